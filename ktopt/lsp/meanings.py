"""What the keys of rule files, and the words of selectors, mean: shown beside completions and on hovering."""

from __future__ import annotations

from ktopt.codes import CODES
from ktopt.lsp.operator_text import sentence

RULE_KEYS = {
    "id": "the rule's own name, in plans and messages",
    "match": "which modules the rule takes, where no earlier rule takes them",
    "replace": "the operator that takes a module's place; `default` keeps the module and only places it",
    "kwargs": "options of the operator",
    "when": "a condition on the machine or the model's config; where it doesn't hold, the rule is inactive",
    "expect": "how many modules the rule must take; anything else is an error",
    "recursive": "`false` leaves all that is inside the module to its operator: no later rule takes any of it",
}
MATCH_KEYS = {
    "name": "a regex that is searched in the module's path; anchor it with ^ and end numbers with \\.",
    "class": "the module is an instance of this class, or of one derived from it",
}
REPLACE_KEYS = {"class": RULE_KEYS["replace"], "kwargs": RULE_KEYS["kwargs"]}
TOP_KEYS = {
    "version": "of the rule language: 1",
    "architectures": "model classes that the file was written for",
    "import": "other native files, relative to this one; this file's rules go before theirs",
    "let": "names for selectors: `$name` stands for them",
    "place": "the device map: device -> selector. A rule's own device goes before it",
    "rules": "the rules: of those that match a module, the first decides",
    "dtype": "what floating-point weights are held in",
    "default_device": "where modules go that nothing places",
    "long_context": "dynamic block attention: the cache's blocks, and which of them are attended to",
    "kvc2": "where blocks of the cache may lie, and how many",
}
FIELDS = {
    "path": "the module's whole path; `~ /regex/` must fit all of it",
    "name": "the last segment of the path, compared whole",
    "class": "the module's class or one that it derives from",
    "type": "the module's class itself, without those that derive from it",
    "layer": "the decoder layer's number: `layer in 0..29`, `layer >= 3`",
    "expert": "the expert's number in its layer",
    "dtype": "the type of the module's own parameters, such as bfloat16",
    "quant": "how the weights file stores the module's parameters, such as Q4_K; needs weights",
    "numel": "how many numbers the module's own parameters hold",
    "bytes": "what the module's own parameters take, in bytes: `bytes > 100MB`",
    "shape[0]": "a dimension of the module's weight",
}
FUNCTIONS = {
    "parent": "the modules that directly hold one of these",
    "children": "the modules directly inside one of these",
    "under": "all modules inside one of these, at any depth",
    "has": "all modules that hold one of these, at any depth",
    "siblings": "other modules with the same parent as one of these",
}
HARDWARE = {
    "cuda_sm": "compute capability of the least of the GPUs: 80 for an A100, 90 for an H100",
    "cuda_count": "how many CUDA GPUs there are",
    "vram": "memory of all accelerators together, in bytes: `hw.vram >= 80GB`",
    "ram": "the machine's memory, in bytes",
    "cores": "how many CPU cores there are",
}
CPU_FEATURES = ("amx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "neon")


def code_page(code: str) -> str:
    """A finding's page as Markdown."""
    c = CODES[code]
    blocks = f"```yaml\n{c.example}\n```\n\nWrite instead:\n\n```yaml\n{c.instead}\n```"
    return f"**{c.code}: {c.title}** ({c.severity})\n\n{sentence(c.what)}\n\n**Why it is bad:** {sentence(c.why)}\n\n{blocks}"
