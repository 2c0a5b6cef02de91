"""An optimized model as a folder that transformers loads: config, generation config, tokenizer, plan.json, and its weights.

    ktopt apply rules.yaml --model M --weights W --out DIR      then      AutoModelForCausalLM.from_pretrained("DIR")

The weights stay where they are, named in config.json by relative path, size, fingerprint and sha256; model.safetensors is then
empty (it is what transformers looks for). With `copy_weights` it holds them instead, still packed as they were (weights/packed.py).
Loading compares size and fingerprint, which takes milliseconds; `ktopt doctor DIR` reads every byte and compares the sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError, UsageError
from ktopt.placement import DTYPES
from ktopt.plan import Plan
from ktopt.plan_check import check_versions, open_plan
from ktopt.plan_json import dump_plan, load_plan
from ktopt.weights.tokenizer import FILES as TOKENIZER_FILES
from ktopt.weights.tokenizer import find_tokenizer, has_tokenizer, stop_tokens

if TYPE_CHECKING:
    from ktopt.applying import ProgressEvent
    from ktopt.applying.checks import Need

PLAN_FILE = "plan.json"
WEIGHTS_FILE = "model.safetensors"
GENERATION_FILE = "generation_config.json"
WRITTEN = frozenset({
    PLAN_FILE, WEIGHTS_FILE, GENERATION_FILE, "config.json", *TOKENIZER_FILES, "additional_chat_templates",
})  # fmt: skip
"""What such a folder consists of."""
SHOWN = 5
"""How many names a message lists."""
AGAIN = "make the folder again with `ktopt apply`"
FIELD_TYPES: dict[type, str] = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}
REF_FIELDS: dict[str, type] = {"path": str, "size": int, "fingerprint": str, "sha256": str, "copied": bool}
HEAD_BYTES = 4 << 20
SAMPLE_BYTES = 64 << 10
SAMPLES = 64
FINGERPRINT = "sampled-sha256"
"""The kind of fingerprint that this version makes, written before it."""


def save_folder(
    plan: Plan,
    out: str | Path,
    weights: str | Path,
    *,
    copy_weights: bool = False,
    tokenizer: Any = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Path:
    """Write the folder `out` for a plan and the weights that it is to be applied to; returns its path.

    Everything is written beside `out` first and renamed at the end, so that a failure leaves nothing. UsageError where `out` can't
    be written, or exists and is neither empty nor such a folder and no more; KtoptError where the weights don't fit the plan.
    `progress` is called after every tensor that is copied, with the file's bytes.
    """
    out = Path(out).absolute()
    check_writable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write(plan, made, out, Path(weights), copy_weights, tokenizer, progress)
        made.chmod(0o755)
        _replace(out, made)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return out


def check_writable(out: str | Path) -> None:
    """UsageError for a folder that can't be made, or that exists and is neither empty nor an optimized model's."""
    out = Path(out).absolute()
    try:
        replaces = out.is_symlink() or out.exists()
        if replaces and not (out.is_dir() and (not any(out.iterdir()) or is_optimized(out))):
            raise UsageError(f"{out} exists and is not a folder that ktopt wrote; name another, or remove it")
        others = sorted(path.name for path in out.iterdir() if path.name not in WRITTEN) if replaces else []
        if others:
            listed = ", ".join(others[:SHOWN]) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
            raise UsageError(f"{out} is replaced as a whole, and holds what ktopt didn't write: move {listed} away first")
        above = next(folder for folder in out.parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=f".{out.name[:100]}-", dir=above))
    except OSError as error:
        raise UsageError(f"{out}: this folder can't be written: {error.strerror or error}") from None


def is_optimized(folder: Path) -> bool:
    """Whether a folder's config.json says that ktopt made it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return bool(config["quantization_config"]["quant_method"] == "ktopt")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replace(out: Path, made: Path) -> None:
    if not out.exists():
        made.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
    out.rename(old / "folder")
    try:
        made.rename(out)
    except OSError:
        (old / "folder").rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _write(
    plan: Plan,
    made: Path,
    out: Path,
    weights: Path,
    copy_weights: bool,
    tokenizer: Any,
    progress: Callable[[ProgressEvent], None] | None,
) -> None:
    from ktopt.applying import ProgressEvent, build_model, open_tensors
    from ktopt.applying.checks import prepare

    with open_tensors(plan, None, weights) as source:
        root = build_model(plan)
        prepared = prepare(plan, root, source, on_the_host(plan))
        if copy_weights:
            from ktopt.weights.packed import write_packed

            def written(tensor: str, done_bytes: int, total_bytes: int) -> None:
                if progress:
                    progress(ProgressEvent(tensor, done_bytes, total_bytes))

            write_packed(made / WEIGHTS_FILE, source, _to_copy(prepared.needs.values(), source), written)
            refs = [{**file_ref(made / WEIGHTS_FILE, made), "path": WEIGHTS_FILE}]
        else:
            _write_empty(made / WEIGHTS_FILE)
            refs = [file_ref(Path(file).absolute(), out) for file in source.files]
        refs = [{**ref, "copied": copy_weights} for ref in refs]
    _write_config(plan, made, refs, root)
    _write_companions(plan, made, weights, root, tokenizer)
    (made / PLAN_FILE).write_text(dump_plan(plan), encoding="utf-8")


def on_the_host(plan: Plan) -> Plan:
    """The plan with every weight on the CPU: what a folder is written by, for a machine whose devices torch may not know here."""
    return replace(plan, steps=tuple(step._replace(generate_device="cpu", replicas=(), elsewhere={}) for step in plan.steps))


def _to_copy(needs: Iterable[Need], source: Any) -> dict[str, str]:
    """What is copied, and the dtype where it can't stay as stored. Of parameters that are one tensor only the first: loading finds
    the others by it."""
    dtypes: dict[str, str] = {}
    ties: set[tuple[str, tuple[str, ...]]] = set()
    for need in needs:
        tie = (need.tie, source.stored(need.read_as).stored)
        if need.read_as in dtypes or (need.tie and tie in ties):
            continue
        ties.add(tie)
        dtypes[need.read_as] = need.dtype
    return dtypes


def _write_empty(path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def file_ref(file: Path, folder: Path) -> dict[str, Any]:
    """A weight file as config.json refers to it: path relative to `folder`, bytes, fingerprint, and sha256 of all bytes."""
    return {
        "path": os.path.relpath(file, folder),
        "size": file.stat().st_size,
        "fingerprint": fingerprint(file),
        "sha256": full_sha256(file),
    }


def full_sha256(file: Path) -> str:
    """sha256 of a whole file, as sha256sum prints it: a second or so a gigabyte."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(file: Path) -> str:
    """ "sampled-sha256:" and a sha256 over a file's size, its first 4 MiB (where GGUF and safetensors list their tensors) and 64
    samples of 64 KiB spread evenly to its end. It takes milliseconds for a file of any size, and tells another model, another
    quantisation, a retrained or a truncated file; bytes between the samples may change unseen."""
    size = file.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        sha.update(stream.read(HEAD_BYTES))
        rest = size - SAMPLE_BYTES - HEAD_BYTES
        for index in range(SAMPLES if rest > 0 else 0):
            stream.seek(HEAD_BYTES + rest * index // (SAMPLES - 1))
            sha.update(stream.read(SAMPLE_BYTES))
        if rest <= 0:
            sha.update(stream.read())
    return f"{FINGERPRINT}:{sha.hexdigest()}"


def _write_config(plan: Plan, made: Path, refs: list[dict[str, Any]], root: Any) -> None:
    config = {key: value for key, value in plan.model.config.items() if key not in ("torch_dtype", "quantization_config")}
    config.setdefault("architectures", list(plan.model.architectures) or [type(root).__name__])
    config["dtype"] = plan.dtype
    config["quantization_config"] = {"quant_method": "ktopt", "plan": PLAN_FILE, "dtype": plan.dtype, "weights": refs}
    (made / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_companions(plan: Plan, made: Path, weights: Path, root: Any, tokenizer: Any) -> None:
    """The generation config and the tokenizer: as given, else from the folder of the weights or the model, or the GGUF file. The
    tokenizer's end token joins those of the generation config, so that `generate` stops where `ktopt run` does."""
    folders = [p if p.is_dir() else p.parent for p in (weights, Path(plan.model.source)) if p.exists() and p.suffix != ".gguf"]
    if not _copy_first(folders, (GENERATION_FILE,), made):
        root.generation_config.save_pretrained(made)
    if tokenizer is None and not _copy_first([f for f in folders if has_tokenizer(f)], TOKENIZER_FILES, made):
        tokenizer = find_tokenizer((weights,))
    if tokenizer is not None:
        tokenizer.save_pretrained(made)
    tokenizer = tokenizer or find_tokenizer((made,))
    if tokenizer is not None:
        _add_stop_tokens(made / GENERATION_FILE, tokenizer)


def _add_stop_tokens(file: Path, tokenizer: Any) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    own = config.get("eos_token_id")
    ends = stop_tokens(own, tokenizer)
    if ends is not None and ends not in (own, [own]):
        config["eos_token_id"] = ends
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_first(folders: list[Path], names: tuple[str, ...], made: Path) -> bool:
    """Copy the files of these names from the first folder that has any."""
    for folder in folders:
        files = [folder / name for name in names if (folder / name).is_file()]
        for file in files:
            shutil.copyfile(file, made / file.name)
        if files:
            return True
    return False


def open_folder(folder: Path, quantization: Any = None, force: bool = False) -> tuple[Plan, Any]:
    """An optimized folder's plan and its open weights. KtoptError names the file that is missing or isn't the one that it was, or
    the versions that made the plan where these don't stand in for them (unless `force`)."""
    if quantization is None:
        quantization = _read_quantization(folder)
    elif not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    check_quantization(quantization, str(folder / "config.json"))
    file = _inside(folder, str(quantization.get("plan", PLAN_FILE)))
    plan = load_plan(file)
    check_versions(plan, str(file), force)
    refs = _refs(folder, quantization)
    files = [_checked(folder, ref) for ref in refs]
    if refs[0].get("copied"):
        from ktopt.weights.packed import PackedWeights

        return plan, PackedWeights(files[0])
    from ktopt.weights.open import open_weights

    gguf = files[0].suffix == ".gguf"
    return plan, open_weights(files[0] if gguf or len(files) == 1 else files[0].parent, plan.model.config)


def verify_folder(folder: Path) -> Iterator[str]:
    """Check an optimized folder fully: its plan against the model that its config builds, and every byte of its weights. Gives the
    name of each file that has passed; KtoptError at the first that doesn't."""
    quantization = _read_quantization(folder)
    check_quantization(quantization, str(folder / "config.json"))
    plan = _inside(folder, str(quantization.get("plan", PLAN_FILE)))
    open_plan(plan)
    yield plan.name
    for ref in _refs(folder, quantization):
        file = _checked(folder, ref)
        if not isinstance(ref.get("sha256"), str) or full_sha256(file) != ref["sha256"]:
            raise KtoptError(f"{folder}: {file} has other bytes than when the folder was made (its sha256 differs)")
        yield str(ref["path"])


def _refs(folder: Path, quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The weight files that the folder's config refers to."""
    refs = list(quantization.get("weights") or ())
    if not refs:
        raise KtoptError(f"{folder / 'config.json'}: quantization_config names no weights; {AGAIN}")
    return refs


def check_quantization(quantization: Mapping[str, Any], where: str) -> None:
    """KtoptError for a quantization_config that isn't as save_folder writes it; `where` names its file."""
    known: dict[str, type] = {"quant_method": str, "plan": str, "dtype": str, "weights": list}
    for name, value in quantization.items():
        if name not in known:
            raise KtoptError(f"{where}: quantization_config has the unknown field {name!r}; {AGAIN}")
        _check_field(value, known[name], f"{where}: quantization_config.{name}")
    dtype = quantization.get("dtype", DTYPES[0])
    if dtype not in DTYPES:
        raise KtoptError(f"{where}: quantization_config.dtype is {dtype!r}, not one of {', '.join(DTYPES)}; {AGAIN}")
    for index, ref in enumerate(quantization.get("weights", ())):
        here = f"{where}: quantization_config.weights[{index}]"
        _check_field(ref, dict, here)
        for name, kind in REF_FIELDS.items():
            if name in ref or name == "path":
                _check_field(ref.get(name), kind, f"{here}.{name}")


def _check_field(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise KtoptError(f"{where} must be {FIELD_TYPES[kind]}, not {value!r:.60}; {AGAIN}")


def _read_quantization(folder: Path) -> Mapping[str, Any]:
    if not is_optimized(folder):
        raise KtoptError(f"{folder} is not a folder that `ktopt apply --out` wrote")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: Mapping[str, Any] = config["quantization_config"]
    return found


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise KtoptError(f"{folder / 'config.json'}: the plan must lie in the folder itself, not at {name!r}")
    return folder / name


def _checked(folder: Path, ref: Mapping[str, Any]) -> Path:
    file = Path(os.path.normpath(folder / ref["path"]))
    if not file.is_file():
        raise KtoptError(f"{folder}: its weights are gone: {file} doesn't exist. Move it back, or make the folder again")
    size, known = file.stat().st_size, str(ref.get("fingerprint", ""))
    if not known.startswith(f"{FINGERPRINT}:"):
        raise KtoptError(f"{folder}: its fingerprint of {file} is of a kind that this ktopt doesn't know; make the folder again")
    if size != ref.get("size"):
        raise KtoptError(f"{folder}: {file} is not the file that the folder was made for: {size} bytes, was {ref.get('size')}")
    if fingerprint(file) != known:
        raise KtoptError(f"{folder}: {file} is not the file that the folder was made for: as long, but with other content")
    return file
