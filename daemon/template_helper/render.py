#!/usr/bin/python3
# Renders a model file's chat template with Jinja, in a process of its own.
#
# The template comes from an untrusted file, so it runs in Jinja's immutable sandbox, and this process is confined by
# whoever starts it (daemon/template_sandbox.cc): no files, no network, no children, little memory. It reads requests
# from descriptor 0 and answers on descriptor 1, each a little-endian u32 length and that many bytes of JSON:
#   {"template": str, "messages": [...], "tools": [...] | null, "variables": {...}, "special_tokens": {name: str},
#    "control_tokens": [str], "output_bytes_max": int, "cpu_seconds": int}
#   -> {"ok": true, "text": str, "marks": [int]} | {"ok": false, "kind": "raised|template|limit|internal", "error": str}
# Of special_tokens the template may use the names; control_tokens are the spellings that only the template's own text may
# produce, but for those it looks for in messages itself. Where a client's text spells one, "marks" holds a byte offset inside it: no control token lies across a mark.
# One answer {"ok": true, "text": ""} is sent unasked when it is ready. End of input ends it. The environment is the one
# templates are written for: blocks trimmed, loop controls, raise_exception, strftime_now, and a tojson filter that
# leaves non-ASCII text and HTML characters alone.

import json
import os
import re
import resource
import struct
import sys

HEADER = struct.Struct("<I")
REQUEST_BYTES_MAX = 64 << 20
ERROR_CHARS_MAX = 1000


def read_exactly(count):
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive():
    (length,) = HEADER.unpack(read_exactly(HEADER.size))
    if length > REQUEST_BYTES_MAX:
        raise EOFError
    return json.loads(read_exactly(length))


def send(answer):
    body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    data = memoryview(HEADER.pack(len(body)) + body)
    while data:
        data = data[os.write(1, data):]


def failure(kind, error):
    return {"ok": False, "kind": kind, "error": str(error)[:ERROR_CHARS_MAX]}


class OutputLimit(Exception):
    pass


def make_environment():
    import datetime

    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class RaisedByTemplate(jinja2.TemplateError):
        pass

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; here it only prints its body."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise RaisedByTemplate(message)

    def strftime_now(pattern):
        return datetime.datetime.now().strftime(pattern)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                          separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return jinja2, RaisedByTemplate, environment


def with_parsed_arguments(messages):
    """Clients send a call's arguments as a string of JSON; templates walk over them as a mapping."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:
                    arguments = json.loads(function["arguments"])
                except ValueError:
                    continue
                if isinstance(arguments, dict):
                    function["arguments"] = arguments
    return messages


def sought(tree, nodes):
    """The words that a template looks for in strings: operands of comparisons ("'</think>' in content") and arguments of
    methods and filters ("content.split('</think>')")."""
    places = []
    for compare in tree.find_all(nodes.Compare):
        places += [compare.expr] + [operand.expr for operand in compare.ops]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            places += call.args
    for filtered in tree.find_all(nodes.Filter):
        places += filtered.args
    return {place.value for place in places if isinstance(place, nodes.Const) and isinstance(place.value, str)}


def strings(value):
    """Every string of a JSON value, keys of objects included."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value)
            stack.extend(value.values())


class Marker:
    """Puts one invisible character into every spelling of a control token in a client's strings. Templates cut, trim and
    join strings, and the character travels along; in the output it tells the client's spellings from the template's. It
    is a noncharacter that occurs in no string of the request and is taken out of the output again.

    A spelling may also arise where a client's string meets the template's text, so strings that begin or end with a part
    of one, or lie inside one, are marked as well."""

    NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    # What templates compare with words; "image" may well lie inside the spelling of a control token.
    COMPARED = ("role", "type")

    def __init__(self, names, sought_words=()):
        # A tag that the template looks for in messages is meant to be written there: "<think>" in many files. A mark inside
        # would hide it.
        names = [name for name in names
                 if not any(name in word or (len(word) > 1 and name.startswith(word)) for word in sought_words)]
        self.names = names
        self.longest = max(map(len, names), default=0)
        self.starts = re.compile("(?=%s)." % "|".join(map(re.escape, names)), re.S) if names else None
        self.hints = {name[:2] for name in names}  # most texts hold none of these, which is seen at once
        self.heads = {name[:i] for name in names for i in range(1, len(name))}
        self.tails = {name[i:] for name in names for i in range(1, len(name))}

    def choose(self, request):
        found = re.compile("[%s]" % self.NONCHARACTERS)
        used = set(found.findall(request["template"]))
        for part in ("messages", "tools", "variables"):
            for text in strings(request[part]):
                used.update(found.findall(text))
        for mark in self.NONCHARACTERS:
            if mark not in used:
                return mark
        raise ValueError("the messages use every noncharacter from U+FDD0 to U+FDEF")

    def text(self, text, mark, inside=True):
        if not text:
            return text
        head = text[: self.longest]
        at_start = any(head[:i] in self.tails for i in range(1, len(head) + 1)) or (
            inside and len(text) < self.longest and any(text in name for name in self.names))
        first = max(0, len(text) - self.longest + 1)
        ends = [i for i in range(first, len(text)) if text[i:] in self.heads]
        places = {i + 1 for i in ends}
        if any(hint in text for hint in self.hints):
            places.update(match.start() + 1 for match in self.starts.finditer(text))
        if at_start:
            places.add(0)
        if not places:
            return text
        pieces, begin = [], 0
        for place in sorted(places):
            pieces.append(text[begin:place])
            begin = place
        return mark.join(pieces + [text[begin:]])

    def value(self, value, mark, inside=True):
        if isinstance(value, str):
            return self.text(value, mark, inside)
        if isinstance(value, list):
            return [self.value(item, mark, inside) for item in value]
        if isinstance(value, dict):
            return {self.text(key, mark, False): self.value(item, mark, inside and key not in self.COMPARED)
                    for key, item in value.items()}
        return value


def without_mark(text, mark):
    """The text without its marks, and where in its UTF-8 they were."""
    pieces = text.split(mark)
    marks, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece.encode("utf-8", "replace"))
        marks.append(at)
    return "".join(pieces), marks


def render(template, request, marker):
    messages = with_parsed_arguments(request["messages"])
    tools, variables, mark = request["tools"], request["variables"], None
    if marker.names:
        mark = marker.choose(request)
        messages = marker.value(messages, mark)
        tools = marker.value(tools, mark)
        variables = marker.value(variables, mark, False)
    values = dict(request.get("special_tokens", {}))
    values.update(variables)
    values.update(messages=messages, tools=tools)
    values.setdefault("documents", None)
    pieces, size = [], 0
    for piece in template.generate(values):
        size += len(piece.encode("utf-8", "replace"))
        if size > request["output_bytes_max"]:
            raise OutputLimit
        pieces.append(piece)
    text = "".join(pieces)
    return without_mark(text, mark) if mark else (text, [])


def allow_cpu(seconds):
    """The kernel ends this process when one request takes longer, even if nobody is left to do it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime) + seconds + 1
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


class Renderer:
    def __init__(self):
        self.jinja2, self.raised, self.environment = make_environment()
        self.source, self.template = None, None
        self.names, self.marker = None, None

    def compiled(self, source, names):
        if source != self.source:
            self.source, self.template = None, None
            self.template = self.environment.from_string(source)
            self.source, self.names = source, None
        if names != self.names:
            self.marker = Marker(names, sought(self.environment.parse(source), self.jinja2.nodes))
            self.names = names
        return self.template

    def answer(self, request):
        try:
            template = self.compiled(request["template"], request.get("control_tokens", []))
            text, marks = render(template, request, self.marker)
            return {"ok": True, "text": text, "marks": marks}
        except self.raised as error:
            return failure("raised", error)
        except OutputLimit:
            return failure("limit", "its output is longer than %d bytes" % request["output_bytes_max"])
        except MemoryError:
            return failure("limit", "it needs more memory than a template may have")
        except RecursionError:
            return failure("limit", "it nests too deeply")
        except self.jinja2.TemplateSyntaxError as error:
            return failure("template", "line %d: %s" % (error.lineno, error.message))
        except Exception as error:  # whatever else a template can provoke, named by its class
            return failure("template", "%s: %s" % (type(error).__name__, error))


def main():
    try:
        renderer = Renderer()
        # The first use of a template imports more modules; afterwards no file is opened any more.
        renderer.environment.from_string("{{ [1] | tojson }}{{ strftime_now('%Y') }}").render()
    except Exception as error:
        send(failure("internal", "%s: %s" % (type(error).__name__, error)))
        return 1
    send({"ok": True, "text": ""})
    while True:
        try:
            request = receive()
        except EOFError:
            return 0
        except (ValueError, RecursionError, MemoryError) as error:
            send(failure("limit", "the request cannot be read: %s" % type(error).__name__))
            continue
        allow_cpu(request["cpu_seconds"])
        send(renderer.answer(request))


if __name__ == "__main__":
    sys.exit(main())
