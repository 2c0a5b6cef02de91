"""Pictures of a plan: its modules as nested groups, by device, with what passes between devices; as dot, JSON, GraphML, SVG and an
HTML page."""
