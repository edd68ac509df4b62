# The Debian packages of the lab inside the VM, sourced by provision.sh and build-box.sh. No QEMU: there is a real kernel.
guest_packages=(make mininet iproute2 iputils-ping iperf3 ethtool procps curl python3-venv kmod
  openvswitch-switch)
