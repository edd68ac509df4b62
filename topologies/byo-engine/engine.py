"""A stand-in for an inference engine: an HTTP server that knows its peers from PDDBED_PEERS. Standard library only.

GET / says who this is; GET /peers asks every other host that runs a program who it is, and how long that took.
"""

import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

ADDRESS, PORT = os.environ["PDDBED_ADDRESS"], int(os.environ["PDDBED_PORT"])
ME = {
    "host": os.environ["PDDBED_HOST"],
    "datacenter": os.environ["PDDBED_DATACENTER"],
    "greeting": os.environ.get("ENGINE_GREETING", ""),
}
PEERS = [peer for peer in json.loads(os.environ["PDDBED_PEERS"]) if peer["name"] != ME["host"]]


def ask(peer):
    """What a peer says of itself, and the milliseconds until it had said so: a connection and a request, two RTTs."""
    began = time.monotonic()
    with urlopen(f"http://{peer['name']}:{peer['port']}/", timeout=10) as reply:
        answer = json.load(reply)
    return {**answer, "milliseconds": round(1000 * (time.monotonic() - began), 1)}


class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        answers = {"/": lambda: ME, "/peers": lambda: [ask(peer) for peer in PEERS]}
        if self.path not in answers:
            self.send_error(404)
            return
        try:
            status, answer = 200, answers[self.path]()
        except OSError as error:  # a peer does not answer
            status, answer = 502, {"error": str(error)}
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    names = ", ".join(peer["name"] for peer in PEERS)
    print(f"{ME['host']} in {ME['datacenter']} listens on {ADDRESS}:{PORT}, its peers are: {names}", flush=True)
    ThreadingHTTPServer((ADDRESS, PORT), Engine).serve_forever()
