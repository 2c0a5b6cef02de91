"""What runs in a replaced module's place: nn.Modules, imported by `apply` through the registry and by nothing else.

The contract of an implementation (see base.py): `build(original, context)` returns a module on the meta device, with the original's
call signature; then each of its tensors is loaded by `load_tensors(context)`, one at a time.
"""
