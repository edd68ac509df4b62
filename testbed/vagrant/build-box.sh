#!/bin/bash
# Builds a libvirt box (Debian 12, its stock kernel) from Debian's packages: no boot, no loop mount, no KVM.
# usage: build-box.sh WORK PROJECT WHEELS   -> WORK/contents/{metadata.json,Vagrantfile,box.img,vmlinuz,initrd.img}
# Runs as root in a mount namespace of its own (sandbox.py), where what it mounts goes with it. PROJECT is a copy of
# the project, which is made before; WHEELS holds all it depends on, or is empty, and then pip takes it from the network.
set -euo pipefail
work=$1 project=$2 wheels=$3
root=$work/root contents=$work/contents
size=${BOX_SIZE:-8G}
say() { echo "box: $*"; }

key=$(find / -xdev -path '*/vagrant-2*/keys/vagrant.pub' -print -quit 2>/dev/null)
[ -n "$key" ] || { echo "vagrant's public key (keys/vagrant.pub) is not where vagrant is installed" >&2; exit 1; }
# This machine's own Debian 12 sources; without any, mmdebstrap takes Debian's public ones.
mapfile -t sources < <(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
  'Created-By: Packages' 'Origin: Debian' | grep -E ' bookworm(-updates|-security)? ' | sort -u)

boot=systemd-sysv,udev,dbus,kmod,openssh-server,sudo,linux-image-amd64,initramfs-tools,busybox,zstd,e2fsprogs,qemu-guest-agent
project_needs=$(. "$project/testbed/vagrant/guest-packages.sh"; IFS=,; echo "${guest_packages[*]}")
rm -rf "$root" "$contents"; mkdir -p "$contents"
say "Debian's packages"
mmdebstrap --variant=minbase --mode=root --aptopt='Apt::Install-Recommends "false"' \
  --include="$boot,$project_needs,ca-certificates,rsync" \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' \
  --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" && printf "MODULES=list\nCOMPRESS=gzip\nRESUME=none\n" > "$1/etc/initramfs-tools/conf.d/vm"' \
  --essential-hook='printf "virtio_pci\nvirtio_blk\nvirtio_net\next4\n" > "$1/etc/initramfs-tools/modules"' \
  bookworm "$root" "${sources[@]}"

echo pddbed >"$root/etc/hostname"
printf '127.0.0.1 localhost pddbed\n::1 localhost\n' >"$root/etc/hosts"
printf '/dev/vda / ext4 defaults,noatime 0 1\n' >"$root/etc/fstab"
mkdir -p "$root/etc/systemd/network"
printf '[Match]\nName=e*\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n[DHCPv4]\nUseDomains=no\n' \
  >"$root/etc/systemd/network/90-dhcp.network"
# An emulated guest is about 15 times slower than its host: it starts what ssh needs, and nothing else.
in_root() { chroot "$root" "$@"; }
in_root systemctl -q enable systemd-networkd ssh
in_root systemctl -q disable openvswitch-switch
in_root systemctl -q mask systemd-networkd-wait-online.service apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer \
  fstrim.timer dpkg-db-backup.timer systemd-timesyncd.service getty@tty1.service e2scrub_reap.service logrotate.timer \
  modprobe@.service modprobe@{configfs,dm_mod,drm,efi_pstore,fuse,loop}.service sys-kernel-debug.mount \
  sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount dev-hugepages.mount dev-mqueue.mount \
  proc-sys-fs-binfmt_misc.automount systemd-binfmt.service systemd-update-utmp.service \
  systemd-update-utmp-runlevel.service systemd-network-generator.service systemd-logind.service serial-getty@ttyS0.service
printf 'blacklist %s\n' kvm_amd kvm_intel iTCO_wdt ahci libata psmouse pcspkr powernow_k8 i2c_i801 lpc_ich joydev evdev \
  button serio_raw acpi_cpufreq qemu_fw_cfg drm bochs cirrus virtio_balloon >"$root/etc/modprobe.d/box.conf"

# What every Vagrant box has: the user, its public key, sudo without a question.
in_root useradd -m -s /bin/bash vagrant
echo vagrant:vagrant | in_root chpasswd
install -d -m 700 "$root/home/vagrant/.ssh"
install -m 600 "$key" "$root/home/vagrant/.ssh/authorized_keys"
in_root chown -R vagrant:vagrant /home/vagrant/.ssh
echo 'vagrant ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/vagrant"
chmod 440 "$root/etc/sudoers.d/vagrant"
printf 'UseDNS no\nPubkeyAcceptedAlgorithms +ssh-rsa\n' >"$root/etc/ssh/sshd_config.d/vagrant.conf"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"    # what this machine trusts

say "Python packages (torch among them), in the place where the provisioner looks for them"
mkdir -p "$root/vagrant" "$root/mnt/wheels"
mount --bind "$project" "$root/vagrant"
mount --bind "$wheels" "$root/mnt/wheels"
venv=/opt/pddbed
from=(--no-index --find-links /mnt/wheels)
if ! compgen -G "$wheels/*.whl" >/dev/null; then
  from=(); cp /etc/resolv.conf "$root/etc/resolv.conf"
fi
in_root python3 -m venv $venv
in_root env PIP_CONFIG_FILE=/dev/null $venv/bin/pip install -q --disable-pip-version-check --no-cache-dir --root-user-action=ignore \
  "${from[@]}" -c /vagrant/constraints.txt -e '/vagrant[dev]' setuptools
touch "$root$venv/.installed"    # as the Makefile does it
umount "$root/vagrant" "$root/mnt/wheels"
rm -f "$root/etc/resolv.conf"; echo 'nameserver 10.0.2.3' >"$root/etc/resolv.conf"    # of user-mode networking
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*; mkdir -p "$root/var/lib/apt/lists/partial"
cp "$root"/boot/vmlinuz-* "$contents/vmlinuz"
cp "$root"/boot/initrd.img-* "$contents/initrd.img"
chmod 644 "$contents"/{vmlinuz,initrd.img}

say "disk image"
truncate -s "$size" "$work/disk.raw"
mkfs.ext4 -q -F -L root -O ^metadata_csum_seed -E lazy_itable_init=1,lazy_journal_init=1 -m 0 -d "$root" "$work/disk.raw"
qemu-img convert -O qcow2 "$work/disk.raw" "$contents/box.img"
printf '{"provider":"libvirt","format":"qcow2","virtual_size":%d}\n' "$(($(stat -c %s "$work/disk.raw") >> 30))" \
  >"$contents/metadata.json"
rm -rf "$work/disk.raw" "$root"
cat >"$contents/Vagrantfile" <<'V'
# Part of the box: it boots its kernel directly, since a boot loader could only be installed by booting.
Vagrant.configure("2") do |config|
  config.ssh.insert_key = false
  config.vm.provider :libvirt do |libvirt|
    libvirt.kernel = File.expand_path("vmlinuz", __dir__)
    libvirt.initrd = File.expand_path("initrd.img", __dir__)
    libvirt.cmd_line = "root=/dev/vda rw console=ttyS0 quiet net.ifnames=0 mitigations=off nokaslr random.trust_cpu=on " \
                       "audit=0 apparmor=0 tsc=reliable init_on_alloc=0 8250.nr_uarts=1 cryptomgr.notests"
    libvirt.disk_bus = "virtio"
  end
end
V
