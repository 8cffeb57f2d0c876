# Takes the template helper's place in a test: speaks its protocol, and answers with what this process can do.
# The content of the first message chooses: "probe", "die" (before answering), "last words" (answers, then ends),
# "nonsense" (an answer that is no JSON), "huge" (an answer longer than allowed).
import errno
import json
import os
import resource
import socket
import struct
import sys


def attempt(action):
    try:
        action()
        return "allowed"
    except OSError as error:
        return errno.errorcode[error.errno]


def send_bytes(body):
    os.write(1, struct.pack("<I", len(body)) + body)


def send(text):
    send_bytes(json.dumps({"ok": True, "text": text}).encode())


def probe():
    limits = {name: resource.getrlimit(getattr(resource, name))[1]
              for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE", "RLIMIT_NOFILE")}
    with open("/proc/self/status") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    return json.dumps({
        "fork": attempt(os.fork),
        "socket": attempt(lambda: socket.socket(socket.AF_INET)),
        "write": attempt(lambda: os.open("/tmp/lode-probe", os.O_WRONLY | os.O_CREAT)),
        "unlink": attempt(lambda: os.unlink("/tmp/lode-probe")),
        "kill": attempt(lambda: os.kill(os.getppid(), 0)),
        "read": attempt(lambda: os.close(os.open("/proc/self/status", os.O_RDONLY))),
        # The listing itself holds one descriptor more.
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "environment": sorted(key for key in os.environ if not key.startswith("LC_")),
        "limits": limits,
        "no_new_privs": fields["NoNewPrivs"],
        "seccomp": fields["Seccomp"],
    })


def main():
    send("")
    while True:
        header = os.read(0, 4)
        if len(header) < 4:
            return
        body = b""
        while len(body) < struct.unpack("<I", header)[0]:
            body += os.read(0, 1 << 20)
        wish = json.loads(body)["messages"][0]["content"]
        if wish == "die":
            os._exit(3)
        if wish == "nonsense":
            send_bytes(b"{[")
        elif wish == "huge":
            os.write(1, struct.pack("<I", 0xFFFFFFFF))
        else:
            send(probe() if wish == "probe" else wish)
        if wish == "last words":
            os._exit(0)


sys.exit(main())
