"""Names as KTransformers has them."""
