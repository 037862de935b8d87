#!/usr/bin/env python3
"""Makes a sysroot whose standard library ThreadSanitizer understands: tsan_sysroot.py FOLDER

Rust's stable toolchain has TSan's runtime, but a standard library without its instrumentation: TSan does not see that
std's locks and condition variables order anything, and reports races that are none. The sources to build std anew are
a component of their own. What every toolchain has is std's bitcode (kept for link-time optimisation) and LLVM's shared
library, which holds the TSan pass: this runs the pass over the bitcode and puts the result into copies of the archives.
"""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

FUNCTION_INDEX = 0xFFFFFFFF  # LLVMAttributeFunctionIndex
OBJECT_FILE = 1  # LLVMObjectFile


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Llvm:
    """The few functions of LLVM's C interface that this takes."""

    def __init__(self, path, target):
        self.lib = ctypes.CDLL(str(path))
        for part in ("TargetInfo", "Target", "TargetMC", "AsmPrinter", "AsmParser"):
            getattr(self.lib, "LLVMInitialize%s%s" % (self.family(target), part))()
        self.context = self.call("LLVMContextCreate")
        triple = target.encode()
        found, message = ctypes.c_void_p(), ctypes.c_char_p()
        if self.lib.LLVMGetTargetFromTriple(triple, ctypes.byref(found), ctypes.byref(message)):
            sys.exit("tsan_sysroot: %s" % message.value.decode())
        cpu = b"x86-64" if target.startswith("x86_64") else b"generic"
        # Optimised, position-independent, the default code model.
        self.machine = self.call("LLVMCreateTargetMachine", found, triple, cpu, b"", 2, 2, 0)

    @staticmethod
    def family(target):
        return {"x86_64": "X86", "aarch64": "AArch64"}[target.split("-")[0]]

    def call(self, name, *arguments):
        function = getattr(self.lib, name)
        function.restype = ctypes.c_void_p
        result = function(*[ctypes.c_void_p(a) if isinstance(a, int) and a > 0xFFFF else a for a in arguments])
        return ctypes.c_void_p(result)

    def check(self, error):
        if error:
            self.lib.LLVMGetErrorMessage.restype = ctypes.c_char_p
            sys.exit("tsan_sysroot: %s" % self.lib.LLVMGetErrorMessage(error).decode())

    def instrument(self, bitcode, result):
        buffer, module, message = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
        if self.lib.LLVMCreateMemoryBufferWithContentsOfFile(
                str(bitcode).encode(), ctypes.byref(buffer), ctypes.byref(message)):
            sys.exit("tsan_sysroot: %s" % message.value.decode())
        if self.lib.LLVMParseBitcodeInContext2(self.context, buffer, ctypes.byref(module)):
            sys.exit("tsan_sysroot: %s holds no bitcode" % bitcode)
        kind = self.lib.LLVMGetEnumAttributeKindForName(b"sanitize_thread", ctypes.c_size_t(15))
        self.lib.LLVMCreateEnumAttribute.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64]
        attribute = self.call("LLVMCreateEnumAttribute", self.context, kind, 0)
        function = self.call("LLVMGetFirstFunction", module)
        while function.value:
            if not self.lib.LLVMIsDeclaration(function):
                self.lib.LLVMAddAttributeAtIndex(function, ctypes.c_uint(FUNCTION_INDEX), attribute)
            function = self.call("LLVMGetNextFunction", function)
        options = self.call("LLVMCreatePassBuilderOptions")
        self.check(self.call("LLVMRunPasses", module, b"tsan-module,function(tsan)", self.machine, options))
        if self.lib.LLVMTargetMachineEmitToFile(
                self.machine, module, str(result).encode(), OBJECT_FILE, ctypes.byref(message)):
            sys.exit("tsan_sysroot: %s" % message.value.decode())
        self.lib.LLVMDisposeModule(module)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    goal = pathlib.Path(sys.argv[1]).absolute()
    rustc = os.environ.get("RUSTC", "rustc")
    version = output(rustc, "-vV")
    target = next(line.split()[1] for line in version.splitlines() if line.startswith("host:"))
    stamp = goal / "version"
    made = version + str(pathlib.Path(__file__).stat().st_mtime_ns)
    if stamp.exists() and stamp.read_text() == made:
        return
    sysroot = pathlib.Path(output(rustc, "--print", "sysroot").strip())
    llvm = sorted((sysroot / "lib").glob("libLLVM*.so*"), key=lambda path: path.stat().st_size)
    if not llvm:
        sys.exit("tsan_sysroot: no libLLVM in %s: this takes a toolchain that rustup installed" % (sysroot / "lib"))
    llvm = Llvm(llvm[-1], target)
    shutil.rmtree(goal, ignore_errors=True)
    old, new = (root / "lib/rustlib" / target / "lib" for root in (sysroot, goal))
    new.mkdir(parents=True)
    for entry in (sysroot / "lib/rustlib" / target).iterdir():
        if entry.name != "lib":
            (new.parent / entry.name).symlink_to(entry)
    for entry in old.iterdir():
        # Not the shared libstd: nobody could tell it from the instrumented one.
        if entry.suffix == ".rlib":
            instrument_archive(llvm, entry, new / entry.name)
        elif entry.suffix != ".so":
            (new / entry.name).symlink_to(entry)
    stamp.write_text(made)


def instrument_archive(llvm, archive, result):
    shutil.copyfile(archive, result)
    # The compiler's own helpers: memcpy and its like must not call into the sanitizer, which calls them.
    if archive.name.startswith("libcompiler_builtins-"):
        return
    with tempfile.TemporaryDirectory() as folder:
        for member in output("ar", "t", archive).split():
            if not member.endswith(".o"):
                continue
            subprocess.run(["ar", "x", archive, member], check=True, cwd=folder)
            old, bitcode = pathlib.Path(folder, member), pathlib.Path(folder, "bitcode")
            bitcode.unlink(missing_ok=True)
            dumped = subprocess.run(
                ["objcopy", "--dump-section", ".llvmbc=%s" % bitcode, old, os.devnull], stderr=subprocess.PIPE)
            if dumped.returncode != 0 or not bitcode.exists() or bitcode.stat().st_size == 0:
                continue  # written in C or assembly
            llvm.instrument(bitcode, old)
            subprocess.run(["ar", "r", result, old], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
