"""Tool calls: how models write them, reading them from text as it comes, and having a model write one."""
