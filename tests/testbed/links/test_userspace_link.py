"""The userspace driver for real: namespaces, TUN devices, the emulator, TCP and UDP through it."""

import hashlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testbed.links.base import LinkError, WanEnd
from testbed.links.rig import HOST_B, WAN_A, WAN_B, Rig, namespace, rig
from testbed.links.userspace import TXQUEUELEN, UserspaceLink
from testbed.machine.netns import network_namespace_of
from testbed.model.impairment import BernoulliLoss, CoDel, GilbertElliottLoss, Impairment, Jitter
from testbed.model.plan import WanPlan

pytestmark = [pytest.mark.root, pytest.mark.quiet]

MS = 1_000_000
MBIT = 1_000_000


@pytest.fixture
def raise_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """`raise_rig(forward, backward=None, ...)`: a rig with a userspace link, gone after the test."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(rig(UserspaceLink, tmp_path, *args, **options))


def link_of(bed: Rig) -> UserspaceLink:
    assert isinstance(bed.link, UserspaceLink)
    return bed.link


def ping_rtts_ms(bed: Rig, count: int = 20, interval_s: float = 0.05) -> list[float]:
    output = bed.run(bed.host_a, ["ping", "-n", "-c", str(count), "-i", str(interval_s), HOST_B])
    return [float(word[5:]) for word in output.split() if word.startswith("time=")]


def iperf3(bed: Rig, *options: str) -> dict[str, Any]:
    """`end` of iperf3's JSON report, host_a to host_b."""
    with bed.popen(bed.host_b, ["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        report = json.loads(bed.run(bed.host_a, ["iperf3", "-J", "-c", HOST_B, *options]))
        server.stdout.read()
    end: dict[str, Any] = report["end"]
    return end


def udp_pair(bed: Rig) -> tuple[socket.socket, socket.socket]:
    """A sender in host_a connected to a receiver in host_b."""
    with network_namespace_of(bed.host_b):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    receiver.bind((HOST_B, 7000))
    receiver.settimeout(5)
    with network_namespace_of(bed.host_a):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.connect((HOST_B, 7000))
    return sender, receiver


def send_numbered(sender: socket.socket, count: int, per_second: float, size: int = 100, first: int = 0) -> None:
    start = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, start + number / per_second - time.monotonic()))
        sender.send((first + number).to_bytes(4, "big") + bytes(size - 4))


def receive_numbers(receiver: socket.socket, count: int, timeout_s: float = 5) -> list[int]:
    receiver.settimeout(timeout_s)
    numbers = []
    try:
        for _ in range(count):
            numbers.append(int.from_bytes(receiver.recv(2048)[:4], "big"))
    except TimeoutError:
        pass
    return numbers


@pytest.mark.parametrize("delay_ms", [0, 1, 20, 200])
def test_ping_shows_the_delay_of_the_file(raise_rig: Callable[..., Rig], delay_ms: int) -> None:
    bed = raise_rig(Impairment(delay_ns=delay_ms * MS))
    rtts = ping_rtts_ms(bed)
    assert len(rtts) == 20
    assert 2 * delay_ms <= min(rtts) <= 2 * delay_ms + 0.5
    assert statistics.median(rtts) <= 2 * delay_ms + 1.0  # 0.5 ms each way


def test_each_direction_has_its_own_delay(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(delay_ns=30 * MS), Impairment(delay_ns=5 * MS))
    assert 35 <= min(ping_rtts_ms(bed)) <= 35.5


@pytest.mark.parametrize("rate_mbit", [10, 200, 1000])
def test_one_tcp_flow_gets_the_rate_less_its_headers(raise_rig: Callable[..., Rig], rate_mbit: int) -> None:
    rate_bps = rate_mbit * MBIT
    bed = raise_rig(Impairment(rate_bps=rate_bps, delay_ns=2 * MS, queue_bytes=max(60_000, rate_bps // 8 // 50)))
    goodput = iperf3(bed, "-t", "2", "-O", "1", "-C", "reno")["sum_received"]["bits_per_second"]
    assert goodput == pytest.approx(rate_bps * (1500 - 52) / 1500, rel=0.02)


def test_a_full_queue_delays_by_its_length_and_drops_the_rest(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(rate_bps=10 * MBIT, delay_ns=5 * MS, queue_bytes=62_500), Impairment(delay_ns=5 * MS))
    sender, _receiver = udp_pair(bed)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            for _ in range(4):
                sender.send(bytes(1472))
            time.sleep(0.002)  # 24 Mbit/s into 10

    flooder = threading.Thread(target=flood)
    flooder.start()
    time.sleep(0.3)
    rtts = ping_rtts_ms(bed, count=20)
    stop.set()
    flooder.join()
    # Pings that found the queue full were lost; the others waited for nearly 50 ms of queue.
    assert rtts
    assert 10 + 50 - 6 <= statistics.median(rtts) <= 10 + 50 + 2
    counters = bed.link.counters()["forward"]
    assert counters["dropped_queue"] > 100
    assert counters["dropped_unasked"] == 0
    assert 61_000 <= counters["queued_bytes_max"] <= 62_500
    assert bed.link.counters()["backward"]["dropped_queue"] == 0


def test_600_small_requests_a_second_through_one_second_all_arrive(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(rate_bps=10 * MBIT, delay_ns=1000 * MS, queue_bytes=100_000))
    sender, receiver = udp_pair(bed)
    threading.Thread(target=send_numbered, args=(sender, 1200, 600.0)).start()
    assert receive_numbers(receiver, 1200) == list(range(1200))


def test_a_shorter_delay_under_traffic_loses_nothing_and_keeps_order(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(delay_ns=300 * MS))
    sender, receiver = udp_pair(bed)
    sending = threading.Thread(target=send_numbered, args=(sender, 3000, 3000.0))
    sending.start()
    for delay_ms in (200, 50, 400, 1):
        time.sleep(0.2)
        bed.link.apply("forward", Impairment(delay_ns=delay_ms * MS))
    assert receive_numbers(receiver, 3000) == list(range(3000))
    sending.join()
    assert bed.link.applied()["forward"]["delay_ns"] == 1 * MS


def test_a_rate_changed_during_a_transfer_shows_at_the_receiver(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(rate_bps=20 * MBIT, delay_ns=MS, queue_bytes=200_000))
    sender, receiver = udp_pair(bed)
    for number in range(100):  # 1500 bytes each: 60 ms at the old rate
        sender.send(number.to_bytes(4, "big") + bytes(1468))
    start = time.monotonic()
    bed.link.apply("forward", Impairment(rate_bps=4 * MBIT, delay_ns=MS, queue_bytes=200_000))
    assert receive_numbers(receiver, 100) == list(range(100))
    assert 0.2 < time.monotonic() - start < 0.32  # most of them at 3 ms a packet
    bed.link.apply("forward", Impairment(delay_ns=MS))
    start = time.monotonic()
    send_numbered(sender, 100, 1e9, size=1472)
    assert len(receive_numbers(receiver, 100)) == 100
    assert time.monotonic() - start < 0.1


def test_a_tcp_stream_cut_into_small_pieces_arrives_byte_for_byte(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(rate_bps=80 * MBIT, delay_ns=2 * MS, queue_bytes=1 << 20))
    send_and_compare(bed, os.urandom(1 << 20) * 8)
    lateness = link_of(bed).lateness()["forward"]
    counters = bed.link.counters()["forward"]
    assert lateness["count"] < counters["packets"] / 2, "super-packets were not kept together"
    for pid in (bed.host_b, bed.router_b):
        assert tcp_and_ip_errors(pid) == 0


def send_and_compare(bed: Rig, payload: bytes) -> None:
    """One TCP connection from host_a to host_b carries `payload`; what arrives must be equal."""
    with network_namespace_of(bed.host_b):
        listener = socket.create_server((HOST_B, 7001))
    digest = hashlib.sha256()

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 20):
                digest.update(data)

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    with network_namespace_of(bed.host_a):
        sender = socket.socket()
    with sender, listener:
        sender.connect((HOST_B, 7001))
        sender.sendall(payload)
        sender.shutdown(socket.SHUT_WR)
        receiving.join(30)
    assert digest.digest() == hashlib.sha256(payload).digest()


def tcp_and_ip_errors(pid: int) -> int:
    """TCP segments with a wrong checksum and IP packets with a wrong header, as the namespace counted them."""
    lines = Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
    total = 0
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        table = dict(zip(names.split()[1:], map(int, values.split()[1:]), strict=True))
        if names.startswith("Tcp:"):
            total += table["InErrs"] + table["InCsumErrors"]
        if names.startswith("Ip:"):
            total += table["InHdrErrors"]
    return total


def test_nonsense_on_the_device_is_counted_and_the_link_goes_on(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(delay_ns=MS))
    with network_namespace_of(bed.router_a):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    raw.bind(("wan-a", 0x0800))
    for data in (b"\x45", b"\x45" + bytes(12), b"\x00" * 60, b"\x4f" + bytes(40), b"\xff" * 1400):
        raw.send(data)
    raw.bind(("wan-a", 0x86DD))
    raw.send(b"\x60" + bytes(59))
    assert len(ping_rtts_ms(bed, count=5)) == 5
    counters = bed.link.counters()["forward"]
    assert counters["dropped_malformed"] == 2
    assert counters["ignored_not_ipv4"] == 3


def test_both_ends_are_set_up_as_planned(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(rate_bps=50 * MBIT, queue_bytes=90_000, delay_ns=7 * MS), Impairment(), mtu=1400)
    applied = bed.link.applied()
    assert applied["forward"]["rate_bps"] == 50 * MBIT
    assert applied["forward"]["queue_bytes"] == 90_000
    assert applied["forward"]["delay_ns"] == 7 * MS
    assert applied["backward"]["rate_bps"] is None
    for direction in ("forward", "backward"):
        assert applied[direction]["mtu"] == 1400
        assert applied[direction]["txqueuelen"] == TXQUEUELEN >= 10_000
    for pid, name, address in ((bed.router_a, "wan-a", WAN_A), (bed.router_b, "wan-b", WAN_B)):
        (device,) = json.loads(bed.run(pid, ["ip", "-j", "addr", "show", name]))
        assert "UP" in device["flags"]
        assert [f"{a['local']}/{a['prefixlen']}" for a in device["addr_info"]] == [str(address)]


def test_the_death_of_the_emulator_takes_its_devices_and_is_told(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment())
    os.kill(link_of(bed).health()["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while has_interface(bed.router_a, "wan-a") or has_interface(bed.router_b, "wan-b"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(LinkError, match=r'wan "rig": the emulator has ended .*relay\.log'):
        bed.link.counters()
    bed.link.close()


def test_waiting_costs_no_cpu(raise_rig: Callable[..., Rig]) -> None:
    """Waking early and polling must end with 80 us a packet, also when an arrival interrupts the wait."""
    bed = raise_rig(Impairment(delay_ns=1000 * MS))
    sender, receiver = udp_pair(bed)
    stat = Path(f"/proc/{link_of(bed).health()['pid']}/stat")
    before = cpu_seconds(stat)
    send_numbered(sender, 20, 40.0)
    assert len(receive_numbers(receiver, 20)) == 20
    assert cpu_seconds(stat) - before < 0.1  # of 1.5 s


def cpu_seconds(stat: Path) -> float:
    user, system = stat.read_text().rsplit(") ", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_device_taken_away_ends_the_emulator_rather_than_spinning(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment())
    emulator = Path(f"/proc/{link_of(bed).health()['pid']}/stat")
    bed.run(bed.router_a, ["ip", "link", "del", "wan-a"])
    deadline = time.monotonic() + 5
    while emulator.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(LinkError, match=r"has ended with status 1 \(a TUN device of wan rig is gone: .*\); see "):
        bed.link.counters()


def test_an_interface_taken_down_and_up_carries_on(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment())
    bed.run(bed.router_b, ["ip", "link", "set", "wan-b", "down"])
    with pytest.raises(subprocess.CalledProcessError):
        ping_rtts_ms(bed, count=2)
    bed.run(bed.router_b, ["ip", "link", "set", "wan-b", "up"])
    bed.run(bed.router_b, ["ip", "route", "replace", "10.91.0.0/24", "via", str(WAN_A.ip)])
    assert len(ping_rtts_ms(bed, count=3)) == 3
    assert bed.link.counters()["forward"]["dropped_unasked"] > 0
    assert link_of(bed).health()["busy_max"] < 0.5


def has_interface(pid: int, name: str) -> bool:
    return any(line.lstrip().startswith(f"{name}:") for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines())


def test_closing_ends_the_emulator_and_the_devices_and_may_be_repeated(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment())
    pid = link_of(bed).health()["pid"]
    bed.link.close()
    bed.link.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not has_interface(bed.router_a, "wan-a")
    with pytest.raises(LinkError, match="not running"):
        bed.link.counters()


OWNER = """
import json, sys, threading, time
from ipaddress import IPv4Interface
from pathlib import Path
from testbed.model.impairment import BernoulliLoss, CoDel, GilbertElliottLoss, Impairment, Jitter
from testbed.links.base import WanEnd
from testbed.links.userspace import UserspaceLink
from testbed.model.plan import WanPlan
a, b = IPv4Interface("172.31.9.0/31"), IPv4Interface("172.31.9.1/31")
pid = int(sys.argv[1])
link = UserspaceLink(WanPlan("w", "a", "b", a, b, Impairment(), Impairment()),
                     (WanEnd(pid, "wan-a", a), WanEnd(pid, "wan-b", b)), pid, Path(sys.argv[2]))
builder = threading.Thread(target=link.build)
builder.start(); builder.join()
time.sleep(0.2)  # the thread that started the emulator is gone: that must not end it
print(json.dumps(link.health() if sys.argv[3:] else link.health()["pid"]), flush=True)
time.sleep(60)
"""


def test_the_emulator_outlives_the_thread_that_built_it_but_not_the_process(tmp_path: Path) -> None:
    with namespace() as pid:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(pid), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert owner.stdout is not None
        emulator = int(owner.stdout.readline())
        owner.kill()
        owner.communicate()
        deadline = time.monotonic() + 5
        while Path(f"/proc/{emulator}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_without_the_right_to_real_time_priority_it_runs_and_says_so(tmp_path: Path) -> None:
    with namespace() as pid:
        command = [
            "setpriv",
            "--bounding-set=-sys_nice",
            sys.executable,
            "-c",
            OWNER,
            str(pid),
            str(tmp_path),
            "health",
        ]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        health = json.loads(owner.stdout.readline())
        owner.kill()
        owner.communicate()
    assert health["realtime"] is False
    assert "SCHED_FIFO refused: Operation not permitted" in health["realtime_refused"]


def test_descriptors_above_1024_are_no_obstacle(raise_rig: Callable[..., Rig]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        bed = raise_rig(Impairment())
        assert len(ping_rtts_ms(bed, count=3)) == 3
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_link_that_memory_cannot_hold_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    with namespace() as pid:
        huge = Impairment(rate_bps=100_000 * MBIT, delay_ns=20_000 * MS, queue_bytes=1 << 30)
        link = make(pid, tmp_path, huge)
        with pytest.raises(LinkError, match=r'wan "w".* x 20000 ms .*lower the rate, the delay or "queue"'):
            link.build()
        assert not has_interface(pid, "wan-a")


def test_a_change_that_memory_cannot_hold_is_refused_and_changes_nothing(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(rate_bps=10 * MBIT, delay_ns=MS, queue_bytes=100_000))
    with pytest.raises(LinkError, match="lower the rate"):
        bed.link.apply("forward", Impairment(rate_bps=100_000 * MBIT, delay_ns=20_000 * MS, queue_bytes=1 << 30))
    assert bed.link.applied()["forward"]["rate_bps"] == 10 * MBIT


def test_a_name_that_is_taken_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    with namespace() as pid:
        first = make(pid, tmp_path, Impairment())
        first.build()
        second = make(pid, tmp_path, Impairment())
        with pytest.raises(LinkError, match="wan-a"):
            second.build()
        assert first.health()["realtime"] in (True, False)
        assert not any(has_interface(pid, f"wan{number}") for number in range(4))
        first.close()


def make(pid: int, run_dir: Path, impairment: Impairment) -> UserspaceLink:
    """A link both of whose ends lie in one namespace."""
    plan = WanPlan("w", "a", "b", WAN_A, WAN_B, impairment, impairment)
    return UserspaceLink(plan, (WanEnd(pid, "wan-a", WAN_A), WanEnd(pid, "wan-b", WAN_B)), pid, run_dir)


def test_lost_and_corrupted_packets_are_what_the_receiver_misses(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(Impairment(loss=BernoulliLoss(0.05), corruption=0.02, delay_ns=MS), Impairment())
    sender, receiver = udp_pair(bed)
    send_numbered(sender, 5000, 5000.0)
    numbers = receive_numbers(receiver, 5000, timeout_s=0.5)
    counters = bed.link.counters()["forward"]
    assert numbers == sorted(set(numbers))
    # Corrupted packets die at a checksum, of IP in the router or of UDP in the host. One flipped bit may hit a
    # field that no checksum covers: none in IPv4 and UDP.
    assert len(numbers) == 5000 - counters["lost"] - counters["corrupted"]
    assert 185 <= counters["lost"] <= 318  # 99.99 % interval of 5 % of 5000
    assert counters["dropped_unasked"] == 0


def test_tcp_survives_everything_at_once_byte_for_byte(raise_rig: Callable[..., Rig]) -> None:
    bed = raise_rig(
        Impairment(
            rate_bps=200 * MBIT,
            queue_bytes=200_000,
            delay_ns=2 * MS,
            jitter=Jitter(MS, "pareto"),
            loss=GilbertElliottLoss(0.002, 0.5),
            duplication=0.01,
            corruption=0.002,
            reordering=0.002,
            codel=CoDel(),
        ),
        Impairment(delay_ns=2 * MS),
    )
    send_and_compare(bed, os.urandom(4 << 20))
    counters = bed.link.counters()["forward"]
    assert min(counters[name] for name in ("lost", "duplicated", "corrupted", "reordered")) > 0
    assert counters["dropped_unasked"] == 0
