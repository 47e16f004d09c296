"""The C++ unit of every instruction set against the portable one, bit for bit: natively where this processor can run it,
emulated where it cannot (``emulation.h`` on AVX2, qemu for AArch64)."""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from branchline.ops.native import usable_isas

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
COMMON = ("-std=c++20", "-O1", "-ffp-contract=off", "-w", f"-I{NATIVE}")

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
X86 = {
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx512": AVX512,
    "avx512bf16": (*AVX512, "-mavx512bf16"),
    "amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8"),
}
NEON = {"neon": ("-march=armv8.2-a+dotprod",)}
EMULATED = (*AVX2, "-include", str(HERE / "emulation.h"))

ON_X86 = platform.machine() in {"x86_64", "AMD64"}
ON_ARM = platform.machine() in {"aarch64", "arm64"}


def build(compiler, folder, units, link=()):
    """The test program with some units (name -> flags of the compiler); returns its path."""
    visits = "".join(f"visit({name})" for name in units)
    # isa.cpp knows the units that run natively: it asks the system for what they need.
    known = [f"-DBRANCHLINE_{name.upper()}" for name, flags in units.items() if flags is not EMULATED]
    sources = {NATIVE / "portable.cpp": (), NATIVE / "matrix.cpp": (), NATIVE / "isa.cpp": known}
    sources |= {HERE / "units.cpp": (f"-DUNITS(visit)={visits}",)}
    sources |= {NATIVE / f"{name}.cpp": flags for name, flags in units.items()}

    def compile_one(source):
        made = folder / f"{source.stem}.o"
        run(compiler, *COMMON, *sources[source], "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    run(compiler, *link, *objects, "-o", folder / "units")
    return folder / "units"


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(str(part) for part in command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def x86(tmp_path_factory):
    compiler = shutil.which("c++")
    if not ON_X86 or compiler is None:
        pytest.skip("needs an x86-64 processor and a C++ compiler")
    if "avx2" not in usable_isas():
        pytest.skip("this processor has no AVX2: the emulation is written in it")
    units = {name: flags if name in usable_isas() else EMULATED for name, flags in X86.items()}
    return build(compiler, tmp_path_factory.mktemp("x86"), units)


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """A command that runs the test program for AArch64."""
    folder = tmp_path_factory.mktemp("arm")
    if ON_ARM and "neon" in usable_isas() and shutil.which("c++"):
        return (build("c++", folder, NEON),)
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs an AArch64 processor with dot products, or aarch64-linux-gnu-g++ and qemu-aarch64")
    return emulator, "-cpu", "max", build(compiler, folder, NEON, link=("-static",))


@pytest.mark.parametrize("unit", X86)
def test_an_x86_unit_gives_the_bits_of_the_portable_one(x86, unit):
    assert " 0 differ" in run(x86, unit)


def test_the_neon_unit_gives_the_bits_of_the_portable_one(arm):
    assert " 0 differ" in run(*arm, "neon")


@pytest.mark.parametrize("unit", X86)
def test_a_unit_leaves_no_function_to_the_others(x86, unit):
    """A function that the linker may share would bring one unit's instructions to processors that lack them."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    shared = [line for line in run("nm", "-C", x86.parent / f"{unit}.o").splitlines() if " W " in line]
    assert [line for line in shared if " emulation::" not in line] == []


def test_emulated_instructions_do_what_their_other_emulation_does(tmp_path):
    """SIMDe was written by others: a definition that we misread would show."""
    if not ON_X86 or not Path("/usr/include/simde/x86/avx512.h").exists() or shutil.which("c++") is None:
        pytest.skip("needs an x86-64 processor, a C++ compiler and SIMDe (Debian: libsimde-dev)")
    program = tmp_path / "emulation"
    run("c++", *COMMON, *AVX2, HERE / "emulation.cpp", "-o", program)
    run(program)
