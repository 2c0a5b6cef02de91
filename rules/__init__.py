"""Rule sets that ship with ktopt: <model>/<machine>.yaml."""
