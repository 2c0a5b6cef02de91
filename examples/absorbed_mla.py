"""KTransformers' rule for absorbed MLA, as its article has it, on a small random DeepSeek-V3.

    python -P examples/absorbed_mla.py

The file places attention on a GPU. Here `remap` puts the CPU in its place, which on the command line is `--remap cuda=cpu`. The
optimized model must write what transformers writes.
"""

import tempfile
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import ktopt

RULES = r"""
- match:
    name: "^model\\.layers\\..*\\.self_attn$"
  replace:
    class: ktransformers.operators.attention.KDeepseekV2Attention
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
      absorb_for_prefill: true
"""
CONFIG = DeepseekV3Config(
    vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, intermediate_size=256,
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=64, n_group=2, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
PROMPT, NEW_TOKENS = 300, 16


def text_of(model: DeepseekV3ForCausalLM, prompt: torch.Tensor) -> list[int]:
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False)
    return made[0, prompt.shape[1] :].tolist()


def main() -> None:
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(CONFIG).eval()
    prompt = torch.randint(2, CONFIG.vocab_size, (1, PROMPT))
    expected = text_of(model, prompt)
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "absorbed.yaml"
        rules.write_text(RULES)
        optimized = ktopt.apply(rules, model, remap={"cuda": "cpu"}, device="cpu")
    found = text_of(optimized, prompt)
    print(f"attention     {type(optimized.model.layers[0].self_attn).__name__}")
    print(f"transformers  {expected}")
    print(f"ktopt         {found}")
    if found != expected:
        raise SystemExit("the texts differ")


if __name__ == "__main__":
    main()
