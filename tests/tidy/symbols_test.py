#!/usr/bin/env python3
# The objects of lode_kernels may leak nothing: each instruction set's object exports exactly one strong symbol, no object has a
# weak one (a weak copy compiled with AVX-512 could win at link time and crash an older CPU), and none needs libm, whose results
# differ between machines. Called by ctest as: symbols_test.py NM liblode_kernels.a
import re
import subprocess
import sys

ENTRIES = {"isa_scalar": "KernelTableScalar", "isa_avx2": "KernelTableAvx2", "isa_avxvnni": "KernelTableAvxVnni",
           "isa_avx512": "KernelTableAvx512", "isa_avx512vbmi": "KernelTableAvx512Vbmi"}
LIBM = re.compile(
    r"^_?(a?(sin|cos|tan)h?|sincos|exp|exp2|exp10|expm1|log|log2|log10|log1p|pow|sqrt|cbrt|hypot|fma|fmod|remainder|"
    r"rint|nearbyint|l?lrint|l?lround|round|roundeven|floor|ceil|trunc|ldexp|frexp|scalbl?n|erfc?|[lt]gamma)[fl]?(@.*)?$")


def main(nm, library):
    lines = subprocess.run([nm, "--format=posix", library], check=True, capture_output=True, text=True).stdout
    problems, exports, member, seen = [], {}, "", 0
    for line in lines.splitlines():
        header = re.match(r".*\[(.+?)\]:$", line)
        if header:
            member = header.group(1).split(".")[0]
            exports.setdefault(member, [])
            continue
        parts = line.split()
        if len(parts) < 2:
            continue
        name, kind = parts[0], parts[1]
        seen += 1
        if kind in "wWvVu" and member in ENTRIES:
            problems.append(f"{member}: weak symbol {name}")
        elif kind == "U" and LIBM.match(name):
            problems.append(f"{member}: needs libm's {name}")
        elif kind in "TDBRGSC":
            exports[member].append(name)
    for member, entry in ENTRIES.items():
        got = exports.get(member)
        if got is None:
            problems.append(f"{member}: object not found in {library}")
        elif len(got) != 1 or not re.search(entry + "Ev$", got[0]):
            problems.append(f"{member}: exports {got}, expected only {entry}")
    for problem in problems:
        print(problem)
    print(f"{seen} symbols of {len(exports)} objects checked")
    return 1 if problems or seen == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
