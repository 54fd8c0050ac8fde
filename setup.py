"""Build of the C++ CPU kernels: one shared library, called through ctypes, without torch's headers.

Every operation is compiled once for each instruction set and the library picks one when it is loaded. The
build is optional: without a compiler, or on a machine that is not x86-64, the package installs without the
library and the torch reference serves. CXX names the compiler; with OCTAVO_REQUIRE_KERNELS set a build that
fails is an error, for images that must have the library.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/octavo_kernels/cpu/src")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
]
# GCC 12 takes the undefined source of a fully masked intrinsic, in its own headers, for an oversight.
FLAGS += ["-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
BASELINE = ["api", "attention_plan", "candidates", "communicator", "dispatch", "operations", "pack"]
BASELINE += ["program", "quantised_pack", "scratch", "thread_pool"]
OPERATIONS = ["attention", "cache", "matmul", "norm", "peak", "quantised", "rotary", "sampling"]
OPERATIONS += ["sum", "table"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"]
AMX = [*AVX512, "-mamx-tile", "-mamx-bf16"]
INSTRUCTION_SETS = {
    "avx2": (AVX2, OPERATIONS),
    "avx512": (AVX512, OPERATIONS),
    "amx": (AMX, [*OPERATIONS, "attention_amx", "matmul_amx"]),
}


class BuildKernels(build_ext):
    """Compiles the library next to the Python modules (in place) or into the wheel."""

    def build_extension(self, ext: Extension) -> None:
        if platform.machine().lower() not in ("x86_64", "amd64"):
            print(f"octavo: no C++ kernels for {platform.machine()}; the torch reference will serve")
            return
        try:
            self._compile(Path(self.get_ext_fullpath(ext.name)))
        except (OSError, subprocess.CalledProcessError) as error:
            if os.environ.get("OCTAVO_REQUIRE_KERNELS"):
                raise
            print(f"octavo: the C++ kernels were not built ({error}); the torch reference will serve")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]

    def _compile(self, library: Path) -> None:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        units = [(name, "baseline", []) for name in BASELINE]
        for isa, (flags, names) in INSTRUCTION_SETS.items():
            units += [(name, isa, [f"-DOCTAVO_ISA={isa}", *flags]) for name in names]

        def compile_unit(unit: tuple[str, str, list[str]]) -> str:
            name, isa, flags = unit
            target = str(objects / f"{name}.{isa}.o")
            command = [*compiler, *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", target]
            subprocess.run(command, check=True)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(compile_unit, units))
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_name(library.name + ".partial")
        subprocess.run([*compiler, "-shared", "-pthread", *built, "-o", str(partial)], check=True)
        partial.replace(library)


setup(
    ext_modules=[Extension("octavo_kernels.cpu.libkernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
