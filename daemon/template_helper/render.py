#!/usr/bin/python3
# Renders a model file's chat template with Jinja, in a process of its own.
#
# The template comes from an untrusted file, so it runs in Jinja's immutable sandbox, and this process is confined by
# whoever starts it (daemon/template_sandbox.cc): no files, no network, no children, little memory. It reads requests
# from descriptor 0 and answers on descriptor 1, each a little-endian u32 length and that many bytes of JSON:
#   {"template": str, "messages": [...], "tools": [...] | null, "variables": {...},
#    "output_bytes_max": int, "cpu_seconds": int}
#   -> {"ok": true, "text": str} | {"ok": false, "kind": "raised|template|limit|internal", "error": str}
# One answer {"ok": true, "text": ""} is sent unasked when it is ready. End of input ends it. The environment is the one
# templates are written for: blocks trimmed, loop controls, raise_exception, strftime_now, and a tojson filter that
# leaves non-ASCII text and HTML characters alone.

import json
import os
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


def render(template, request):
    values = dict(request["variables"])
    values.update(messages=with_parsed_arguments(request["messages"]), tools=request["tools"])
    values.setdefault("documents", None)
    pieces, size = [], 0
    for piece in template.generate(values):
        size += len(piece.encode("utf-8", "replace"))
        if size > request["output_bytes_max"]:
            raise OutputLimit
        pieces.append(piece)
    return "".join(pieces)


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

    def compiled(self, source):
        if source != self.source:
            self.source, self.template = None, None
            self.template = self.environment.from_string(source)
            self.source = source
        return self.template

    def answer(self, request):
        try:
            return {"ok": True, "text": render(self.compiled(request["template"]), request)}
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
