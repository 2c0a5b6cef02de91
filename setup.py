"""Builds the CPU kernels (kernels/cpu). Everything else of the package is in pyproject.toml.

A file of an instruction set is compiled with that set's flags and no other file is, so that one build runs on every CPU;
dispatch.cpp chooses. Where there is no C++ compiler the package installs without the extension, and computes by torch.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FOLDER = "kernels/cpu"
FILES = sorted((ROOT / FOLDER).glob("*.cpp"))
BINDINGS = [path.stem for path in FILES if path.stem.startswith("module")]
SOURCES = [path.stem for path in FILES if not path.stem.startswith(("module", "isa_avx"))]
ALSO_READ = sorted(path.name for path in (*(ROOT / FOLDER).glob("*.h"), *(ROOT / FOLDER).glob("isa_avx*.cpp")))
COMMON = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-g0",
    "-Wall",
    "-Wextra",
    "-pthread",
]
# gcc 12 warns of its own headers' undefined vectors, and of loops that it has unrolled past what they can reach; it notes what
# older ones did with vectors as arguments
COMMON += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-stringop-overflow", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "avx2": ("isa_avx2.cpp", AVX2),
    "avx512": ("isa_avx512.cpp", AVX512),
    "avx512vnni": ("isa_avx512.cpp", [*AVX512, "-mavx512vnni"]),
    "avx512bf16": ("isa_avx512.cpp", [*AVX512, "-mavx512vnni", "-mavx512bf16"]),
}


def instruction_sets() -> dict[str, tuple[str, list[str]]]:
    """What this machine's kind of CPU may have beyond plain C++: the file, and its flags."""
    return INSTRUCTION_SETS if platform.machine() in ("x86_64", "AMD64") else {}


class BuildKernels(build_ext):
    """Compiles the files of instruction sets, each with its own flags, before the rest."""

    def build_extension(self, ext: Extension) -> None:
        for name, (source, flags) in instruction_sets().items():
            ext.extra_objects += self.compiler.compile(
                [f"{FOLDER}/{source}"],
                output_dir=f"{self.build_temp}/{name}",
                extra_postargs=[*ext.extra_compile_args, *flags],
                depends=ext.depends,
            )
        super().build_extension(ext)


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "ktopt.kernels.cpu._cpu",
                [f"{FOLDER}/{name}.cpp" for name in (*BINDINGS, *SOURCES)],
                depends=[f"{FOLDER}/{name}" for name in ALSO_READ],
                extra_compile_args=COMMON,
                extra_link_args=["-pthread"],
                py_limited_api=True,
                optional=True,
            )
        ],
        cmdclass={"build_ext": BuildKernels},
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
