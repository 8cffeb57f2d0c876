#!/usr/bin/env python3
# Rules about files as text: every source is in a build list, nothing is dead, nothing is too long or too wide, no word that
# does not belong here. One line per finding.
import os
import re

from files import ROOT, finish, read, tracked

FILE_LINES_MAX, FILE_LINES_AIM = 800, 400
FUNCTION_LINES_MAX = 70
# A ratchet: functions that are longer already. Numbers only go down; no file is added.
LONG_FUNCTIONS = {"gpu_worker/cpu_lanes.cc": 76, "tests/gpu_worker/plan_check_test.cc": 72}
# The format's limit is 100 columns (.clang-format). Rows of X lists are tables and may be wide. A ratchet: files written before
# the limit was checked hold this many wider lines; the number only goes down, and reformatting a file lowers it.
WIDTH_MAX = 120
WIDE_LINES_MAX = 100
TABLE_ROW = re.compile(r"^\s*(X\(|#define \w+\(X\)|\")")

CODE = (".cc", ".h", ".inc", ".cu", ".cuh")
TEXT = CODE + (".py", ".sh", ".proto", ".md", ".txt", ".toml", ".service", ".yaml", ".json", ".cmake")
# Device tests are built by their own script; data and goldens are not written by people.
NOT_IN_CMAKE = ("tests/device/",)
DATA = ("tests/models/", "tests/data/", "tests/fuzz/gguf_seeds/")

# Spelled in pieces, so that this file passes its own rules.
BANNED = [(re.compile(pattern), why) for pattern, why in [
    (r"(?<![\w./-])/wo" r"rk\b", "a path of somebody's machine"),
    (r"(?<![\w./-])/ro" r"ot\b", "a path of somebody's machine"),
    (r"\.\./sha" r"red\b", "a path outside the repository"),
    (r"\bhelp" r"er-[a-z]", "how the code was written is not part of it"),
    (r"(?i)\bclau" r"de\b", "a name that does not belong here"),
    (r"(?i)\banth" r"ropic\b", "a name that does not belong here (as the name of an API: README and docs/ only)"),
    (r"\bTO" r"DO\b(?!\(#\d+\))", "an open point without an issue: TO" "DO(#123)"),
    (r"\bFIX" r"ME\b|\bXX" r"X\b", "a leftover marker"),
    (r"^\s*#\s*if\s+0\b", "dead code"),
]]
API_NAME_ALLOWED = ("README.md", "docs/")


def build_list_patterns(paths):
    """Every source named in a CMakeLists.txt, as a regular expression: ${VARIABLE} inside a name matches anything."""
    patterns = []
    for path in paths:
        if os.path.basename(path) != "CMakeLists.txt":
            continue
        text = re.sub(r"#.*", "", read(path))
        for name in re.findall(r"[\w./${}-]+\.(?:cc|cu|py)\b", text):
            name = name.replace("${CMAKE_CURRENT_SOURCE_DIR}/", "")
            if name.startswith("${CMAKE_SOURCE_DIR}/"):
                full = name[len("${CMAKE_SOURCE_DIR}/"):]
            else:
                full = os.path.normpath(os.path.join(os.path.dirname(path), name))
            patterns.append(re.compile(re.sub(r"\\\$\\\{\w+\\\}", r"\\w+", re.escape(full)) + "$"))
    return patterns


def check_lists(paths):
    patterns = build_list_patterns(paths)
    for path in paths:
        if path.endswith((".cc", ".cu")) and not path.startswith(NOT_IN_CMAKE):
            if not any(p.match(path) for p in patterns):
                yield f"{path}: in no CMakeLists.txt; add it or delete it"
        if path.endswith("_test.py") and not any(p.match(path) for p in patterns):
            yield f"{path}: a test that nobody runs; add it to a CMakeLists.txt"


def check_headers(paths):
    included = set()
    for path in paths:
        if path.endswith(CODE):
            for name in re.findall(r'^\s*#\s*(?:include|define \w+)\s+"([^"]+)"', read(path), re.M):
                included.add(name)
                included.add(os.path.normpath(os.path.join(os.path.dirname(path), name)))
    for path in paths:
        if path.endswith((".h", ".cuh", ".inc")) and path not in included:
            yield f"{path}: included by nobody"


def check_sizes(path, lines):
    if len(lines) > FILE_LINES_MAX:
        yield f"{path}: {len(lines)} lines; at most {FILE_LINES_MAX}"
    elif len(lines) > FILE_LINES_AIM:
        print(f"note: {path} has {len(lines)} lines, the aim is {FILE_LINES_AIM}")


def check_functions(path, lines):
    """Functions at namespace level, as clang-format lays them out: the head at column 0, its closing brace too."""
    start = None
    for number, line in enumerate(lines, 1):
        if start is None:
            if re.match(r"[A-Za-z_].*\)( const| noexcept| override)*( ->.*)? \{$", line) or (
                    re.match(r"\s+.*\)( const)? \{$", line) and number > 1 and re.match(r"[A-Za-z_][^;{}#]*[,(]$", lines[number - 2])):
                start = number
        elif line.startswith("}"):
            limit = LONG_FUNCTIONS.get(path, FUNCTION_LINES_MAX)
            if number - start + 1 > limit:
                yield f"{path}:{start}: a function of {number - start + 1} lines; at most {limit}"
            start = None


def check_width(paths):
    wide = [f"{path}:{number}: {len(line)} columns" for path in paths if path.endswith(CODE)
            for number, line in enumerate(read(path).splitlines(), 1) if len(line) > WIDTH_MAX and not TABLE_ROW.match(line)]
    print(f"note: {len(wide)} lines are wider than {WIDTH_MAX} columns, {WIDE_LINES_MAX} is the ratchet")
    if len(wide) > WIDE_LINES_MAX:
        yield from wide
        yield f"{len(wide)} lines wider than {WIDTH_MAX} columns; run clang-format over the new ones"


def check_words(path, lines):
    for number, line in enumerate(lines, 1):
        for pattern, why in BANNED:
            match = pattern.search(line)
            if match and not (match.group().lower().startswith("anth") and path.startswith(API_NAME_ALLOWED)):
                yield f"{path}:{number}: '{match.group().strip()}': {why}"


def check_head(path, lines):
    """A source opens with what it is for."""
    head = lines[1:] if lines and lines[0].startswith("#!") else lines
    if head and not head[0].startswith(("//", "#", "/*", '"""')):
        yield f"{path}: opens with code; it should open with what the file is for"


def main():
    paths = tracked()
    findings = list(check_lists(paths)) + list(check_headers(paths))
    for path in paths:
        if path.startswith(DATA) and not path.endswith((".md", ".py")):
            continue
        name = os.path.basename(path)
        if not (path.endswith(TEXT) or name in ("LICENSE", "run", ".gitignore", ".clang-format")):
            continue
        lines = read(path).splitlines()
        findings += check_words(path, lines)
        if path.endswith(CODE + (".py", ".sh", ".proto")):
            findings += check_sizes(path, lines)
            findings += check_head(path, lines)
        if path.endswith(CODE):
            findings += check_functions(path, lines)
    findings += check_width(paths)
    finish(findings, f"{len(paths)} files under {os.path.basename(ROOT)}")


main()
