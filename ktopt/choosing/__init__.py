"""Which of the rule sets that ship suits a model and a machine: the answer of `ktopt rules`.

sets.py knows the sets, by name and for which machine each is; fits.py compiles them for a model and compares with what a machine
has.
"""
