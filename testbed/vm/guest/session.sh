#!/bin/bash
# PID 1 of the VM, on the host's own root: make the rest of a small Linux, run one command, report, wait to be ended.
# The job directory holds argv and env (NUL-separated), cwd, nonce and modules; out/ goes back to the host.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

# The host's /run and /dev/shm are another system's state.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock /run/openvswitch /dev/shm /dev/pts /dev/net
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts   # Mininet opens ptys
# udev would do the following.
ln -snf /proc/self/fd /dev/fd
ln -snf /proc/self/fd/0 /dev/stdin
ln -snf /proc/self/fd/1 /dev/stdout
ln -snf /proc/self/fd/2 /dev/stderr
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf 2>/dev/null
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
mkdir -p /tmp && chmod 1777 /tmp

mapfile -t modules < /job/load
modprobe -a "${modules[@]}" || echo "pddbed-vm: some modules are missing" >/dev/console
chmod 666 /dev/net/tun 2>/dev/null
sysctl -qw kernel.printk="1 4 1 7"    # the console is for what goes wrong
# A namespace may choose only among these, whatever modules are loaded.
sysctl -qw net.ipv4.tcp_allowed_congestion_control="$(sysctl -n net.ipv4.tcp_available_congestion_control)"
hostname pddbed-vm
ip link set lo up
echo "$(cut -d' ' -f1 /proc/uptime)" > /job/booted

mapfile -d '' -t argv < /job/argv
mapfile -d '' -t variables < /job/env
mapfile -d '' -t place < /job/cwd
nonce=$(cat /job/nonce)

# Each stream is a pipe copied to a virtio port: programs may reopen /dev/stdout, which a port forbids, and a port is
# 8-bit clean, which the console is not.
ports=(/dev/vport*p1 /dev/vport*p2)    # numbered by the order of virtio devices
exec 3>"${ports[0]}" 4>"${ports[1]}"
mkfifo /run/pddbed-stdout /run/pddbed-stderr
cat /run/pddbed-stdout >&3 & copy_out=$!
cat /run/pddbed-stderr >&4 & copy_err=$!
(
  for variable in "${variables[@]}"; do export "${variable?}"; done
  cd "${place[0]}" || exit 126
  exec "${argv[@]}"
) </dev/null >/run/pddbed-stdout 2>/run/pddbed-stderr 3>&- 4>&-
status=$?

# A daemon that the command left behind may hold the pipes open for ever.
for _ in {1..30}; do
  kill -0 $copy_out 2>/dev/null || kill -0 $copy_err 2>/dev/null || break
  sleep 0.1
done
kill $copy_out $copy_err 2>/dev/null
wait $copy_out $copy_err 2>/dev/null
sync
# The host reads each stream up to its trailer: nothing can be lost between the last byte and the power switch.
printf '\0%s %d\n' "$nonce" "$status" >&4
printf '\0%s %d\n' "$nonce" "$status" >&3
sleep 30
echo o > /proc/sysrq-trigger
sleep 60
