#!/bin/bash
# Vagrant runs this as root in the VM: the project's own set-up, in /vagrant, as `make setup` does it anywhere.
# The virtual environment is the guest's own: the one of the host's checkout is for another machine.
set -euo pipefail
cd /vagrant
. testbed/vagrant/guest-packages.sh

modules=(sch_netem sch_tbf sch_ingress tun veth bridge openvswitch tcp_bbr)
printf '%s\n' "${modules[@]}" >/etc/modules-load.d/pddbed.conf
modprobe -a "${modules[@]}"

if ! command -v make >/dev/null; then
  apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends make
fi
make setup VENV=/opt/pddbed PACKAGES="${guest_packages[*]}"
if [ -n "${PDDBED_VM_MODEL:-}" ]; then pddbed model get "$PDDBED_VM_MODEL"; fi
echo "pddbed is set up: vagrant ssh -c 'sudo pddbed up /vagrant/topologies/two-dc.yaml --api 0.0.0.0:8000'"
