"""Where modules go that nothing places: the placement with the least time of a decoded token, among those that fit.

units.py brings a model on a machine into a Problem, solve.py solves it, writing.py makes a `place:` map of what comes out.
"""
