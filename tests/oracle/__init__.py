"""An oracle for rule resolution, written from the facts of KTransformers' behaviour and independent of ktopt's own stages."""
