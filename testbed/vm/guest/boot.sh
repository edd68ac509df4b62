#!/bin/busybox sh
# First program in the VM (initramfs): mount the host's root read-only under a throw-away overlay, then hand over
# to session.sh. Runs with busybox alone. Whatever fails here powers the VM off: the console tells why.
/bin/busybox --install -s /bin
fail() { echo "pddbed-vm: $*" >/dev/console; poweroff -f; sleep 60; }

mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs devtmpfs /dev || fail "no proc, sys or dev"
for module in /modules/*.ko; do
  insmod "$module" || fail "cannot load $module"
done

p9=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $p9,cache=loose,ro host /ro || fail "cannot mount the host's root"
# The job directory is shared both ways: nothing of it may be cached.
mount -t 9p -o $p9,cache=none job /job || fail "cannot mount the job directory"

# Writes go to memory; 90% of it may be files.
mount -t tmpfs -o size=90%,mode=755 overlay /rw && mkdir /rw/upper /rw/work || fail "no memory for the overlay"
mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work overlay /newroot || fail "no overlay"

mkdir -p /newroot/lib/modules /newroot/job
mount --bind "/newroot$(cat /job/modules)" /newroot/lib/modules || fail "cannot see the module tree"
for directory in proc sys dev job; do
  mkdir -p /newroot/$directory
  mount --move /$directory /newroot/$directory || fail "cannot move /$directory"
done
exec switch_root /newroot /bin/bash /job/session.sh
fail "the host has no /bin/bash"
