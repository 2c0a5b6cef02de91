"""What transformers' own modules hold while they run, by what part of a model they are.

Each is read off the order in which its forward makes tensors and lets go of them; an operator that replaces a module's forward
declares its own. What an operation takes inside itself is not in it. What stands around a module (the hidden states that the layer
and the model still hold) is counted by who adds it up.

A row of experts is a hidden state, once for each of its experts.
"""

from __future__ import annotations

from ktopt.cache.blocks.memory import LayerShape, layer_shapes
from ktopt.diagnostics import KtoptError
from ktopt.operators.kernel_memory import running_op
from ktopt.operators.latent_memory import FLOAT_BYTES, LatentSizes
from ktopt.operators.model_sizes import ModelSizes
from ktopt.placement import Running, Working

ROTATING = 4
"""Queries that are held at once while they are rotated: themselves, times the cosine, the other half, and that times the sine."""
LARGEST_GROUPED = 256
"""Up to so many numbers of a head torch's attention takes fewer heads of keys than of queries as they are."""


def own_working(running: Running) -> Working:
    """By the module's role."""
    made = BY_ROLE.get(running.step.role)
    return made(running) if made is not None else Working()


def attention(running: Running) -> Working:
    """Grouped-query attention by torch's scaled_dot_product_attention; latent attention; a layer of linear attention."""
    if isinstance(running.model.get("kv_lora_rank"), int):
        return latent_attention(running)
    shape = shape_of(running)
    if shape is None:
        return linear_attention(running)
    sizes, item = ModelSizes.of(running.model), running.item
    key = shape.rows * shape.key_dim * item
    query = sizes.heads * shape.key_dim * item
    cache = running.sequences * kept_tokens(running, shape) * 2 * key
    if running.tokens == 1:
        return Working(
            cache, 2 * running.rows * query + cache // 2
        )  # a cache that grows by a token copies its keys, then its values
    attending = 2 * running.rows * query + growing(running, cache)
    if running.masked:
        seen = running.sequences * running.context
        repeated = 2 * seen * query if sizes.heads > shape.rows else 0
        attending = 2 * running.rows * query + repeated + running.tokens * seen * item  # the mask as numbers
    return Working(cache, max(running.rows * (ROTATING * query + 2 * key), attending))


def growing(running: Running, cache: int) -> int:
    """What a layer's cache copies of itself as it grows: its keys, then its values, as far as they were there."""
    before = running.context - running.tokens
    return cache // 2 * before // max(1, running.context)


def shape_of(running: Running) -> LayerShape | None:
    """What the layer keeps of a token; None where it attends to none, or the config doesn't tell."""
    try:
        shapes = layer_shapes(running.model)
    except KtoptError:
        return None
    number = next((int(part) for part in running.step.path.split(".") if part.isdecimal()), 0)
    return shapes[number] if number < len(shapes) else None


def kept_tokens(running: Running, shape: LayerShape) -> int:
    """The tokens that a layer's cache holds: with a sliding window those that it sees and those that have just come."""
    return running.context if shape.window is None else min(running.context, shape.window - 1 + running.tokens)


def linear_attention(running: Running) -> Working:
    """The state of a gated delta rule, in float32, and of its convolution."""
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads")
    found = [running.model.get(name) for name in names]
    if not all(isinstance(value, int) for value in found):
        return Working()
    heads, key, value, key_heads = (int(number) for number in found if number is not None)
    channels = 2 * key_heads * key + heads * value
    state = heads * key * value * FLOAT_BYTES + channels * int(running.model.get("linear_conv_kernel_dim") or 0) * running.item
    return Working(running.sequences * state, running.rows * ROTATING * channels * running.item)


def latent_attention(running: Running) -> Working:
    """Latent attention, which expands all of the context to keys and values of every head. Keys have more numbers than values, for
    which torch on a CPU has no attention without scores in memory: it computes in float32, with scores and their softmax at a time,
    and queries and keys times the scale."""
    sizes = LatentSizes.of(running.model)
    if sizes is None:
        return Working()
    item, heads, seen = running.item, sizes.heads, running.sequences * running.context
    narrow = item < FLOAT_BYTES
    cache = seen * sizes.token_numbers * item
    query, key = running.rows * heads * (sizes.nope + sizes.rope), seen * heads * (sizes.nope + sizes.rope)
    held = (2 * query + key + seen * heads * (sizes.nope + sizes.value)) * item
    mask = running.tokens * seen * item if running.tokens > 1 else 0
    if running.kind != "cpu":
        return Working(cache, held + running.rows * heads * sizes.value * item + mask * running.masked)
    wide = FLOAT_BYTES * (query + key + narrow * seen * heads * sizes.value)
    scores = running.tokens * seen * heads * (2 * FLOAT_BYTES + narrow * item)
    return Working(cache, held + wide + scores + mask)


def dense_mlp(running: Running) -> Working:
    """Gate, the activation's result, up, and the product of both: three at a time."""
    sizes = ModelSizes.of(running.model)
    inner = sizes.shared_inner if "shared_expert" in running.step.path else sizes.inner
    wide = running.rows * inner
    converted = wide * (2 * running.item + FLOAT_BYTES) if converts(running) else 0
    return Working(0, max(3 * wide * running.item, converted))


def converts(running: Running) -> bool:
    """Whether a linear below makes its result in float32 before it is in the dtype of hidden states."""
    return running.item < FLOAT_BYTES and any(running_op(step) == "KLinearCPUInfer" for step in running.below)


def experts(running: Running) -> Working:
    """All experts in grouped products: of each row its hidden state, the experts' result, that weighted, and that in order."""
    sizes = ModelSizes.of(running.model)
    if one_by_one(running):
        return Working(0, running.rows * (3 * sizes.expert_inner + 3 * sizes.hidden) * running.item)
    row = max(sizes.hidden + 4 * sizes.expert_inner, 4 * sizes.hidden)
    return Working(0, running.rows * sizes.chosen * row * running.item)


def one_by_one(running: Running) -> bool:
    """Whether experts are a list of modules, which their block calls one after the other."""
    return any(step.path == f"{running.step.path}.0" for step in running.below)


def head(running: Running) -> Working:
    """Logits of each sequence's last token."""
    return Working(0, running.sequences * ModelSizes.of(running.model).vocabulary * running.item)


def embedding(running: Running) -> Working:
    """The hidden states that a layer begins with."""
    return Working(0, running.rows * ModelSizes.of(running.model).hidden * running.item)


BY_ROLE = {"attention": attention, "mlp": dense_mlp, "experts": experts, "linear": head, "embedding": embedding}
