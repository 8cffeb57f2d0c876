#!/usr/bin/env python3
# Documents tell the truth: links lead somewhere, commands of the README exist with the flags it uses.
# Called by ctest as: docs_test.py BIN_DIR
import os
import re
import subprocess
import sys

from files import ROOT, finish, read, tracked


def check_links(path):
    text = re.sub(r"```.*?```", "", read(path), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue  # web addresses are not asked
        name, _, anchor = target.partition("#")
        full = os.path.normpath(os.path.join(ROOT, os.path.dirname(path), name)) if name else os.path.join(ROOT, path)
        if not os.path.exists(full):
            yield f"{path}: the link {target} leads nowhere"
        elif anchor and full.endswith(".md"):
            with open(full, encoding="utf-8") as file:
                titles = re.findall(r"^#+ (.*)$", file.read(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            if anchor not in slugs:
                yield f"{path}: the link {target} names no heading"


def commands(text):
    for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.S):
        for line in block.splitlines():
            line = line.split(" #")[0].strip().rstrip("&").strip()
            if line:
                yield line


def help_of(binary, *words):
    return subprocess.run([binary, *words, "--help"], capture_output=True, text=True).stdout


def check_command(line, folder):
    program = line.split()[0]
    words = re.sub(r'"[^"]*"', "", line).split()[1:]
    if program.startswith("build/release/bin/"):
        binary = os.path.join(folder, os.path.basename(program))
        if not os.path.exists(binary):
            yield f"README.md: {program} is not built"
            return
        subcommand = [words[0]] if words and os.path.basename(program) == "lode" and not words[0].startswith("-") else []
        known = help_of(binary, *subcommand)
        if not known:
            yield f"README.md: '{line}': no such command"
        for flag in (w.split("=")[0] for w in words if re.match(r"-", w)):
            if not re.search(rf"(^|[\s,]){re.escape(flag)}\b", known):
                yield f"README.md: '{line}': {flag} is no flag of it"
    elif "/" in program and not os.access(os.path.join(ROOT, program), os.X_OK):
        yield f"README.md: {program} cannot be run"


def main(folder):
    findings = []
    documents = [p for p in tracked() if p.endswith(".md")]
    for path in documents:
        findings += check_links(path)
    readme = read("README.md")
    for line in commands(readme):
        findings += check_command(line, folder)
    # Commands named in running text.
    listed = re.search(r"`lode --help` teaches the rest: (.*?)\.", readme, re.S)
    known = help_of(os.path.join(folder, "lode"))
    for name in re.findall(r"`(\w+)[^`]*`", listed.group(1) if listed else ""):
        if not re.search(rf"^\s+{name}\b", known, re.M):
            findings.append(f"README.md: `lode {name}` is no command")
    finish(findings, f"{len(documents)} documents")


main(sys.argv[1])
