# pddbed: `make demo` and `make test` are complete on a fresh Debian or Ubuntu machine, as root or with sudo.
# The first call installs Debian packages and a virtual environment; later calls are fast.

SHELL   := /bin/bash
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
SUDO    := $(shell [ $$(id -u) = 0 ] || echo sudo)
PDDBED  := $(SUDO) $(abspath $(BIN))/pddbed

# network: mininet's mnexec, tools that users run inside hosts; vm: a kernel with netem under QEMU; a font for pictures
PACKAGES := mininet iproute2 iputils-ping iperf3 ethtool procps curl python3-venv \
            qemu-system-x86 busybox-static kmod fonts-dejavu-core

VAGRANT_PACKAGES := vagrant vagrant-libvirt libvirt-daemon libvirt-clients qemu-system-x86 qemu-utils mmdebstrap \
                    debian-archive-keyring e2fsprogs rsync openssh-client git

.PHONY: help packages link setup demo test gpu-test lint clean
.DEFAULT_GOAL := help

help:  ## this text
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

packages:
	@missing=(); for p in $(PACKAGES); do \
	  [[ $$(dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null) == installed ]] || missing+=($$p); done; \
	if (( $${#missing[@]} )); then \
	  echo "installing Debian packages: $${missing[*]}"; \
	  command -v apt-get >/dev/null || { echo "make: this is not Debian or Ubuntu; install the equivalents of: $${missing[*]}" >&2; exit 1; }; \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive bash -c 'apt-get -q update && apt-get -q install -y --no-install-recommends "$$@"' - "$${missing[@]}" >/tmp/pddbed-apt.$$$$.log 2>&1 \
	    || { tail -20 /tmp/pddbed-apt.$$$$.log >&2; exit 1; }; rm -f /tmp/pddbed-apt.$$$$.log; fi

# The stamp holds what was installed, so that a change of the dependencies installs again.
$(VENV)/.installed: pyproject.toml constraints.txt | packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; set PYTHON=" >&2; exit 1; }
	@echo "installing Python packages into $(VENV) (torch alone is 200 MB)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' >$(VENV)/install.log 2>&1 || { tail -20 $(VENV)/install.log >&2; exit 1; }
	@touch $@

link: $(VENV)/.installed
	@# sudo's PATH lacks a virtual environment
	@[ "$$(readlink /usr/local/bin/pddbed)" = "$(abspath $(BIN))/pddbed" ] || $(SUDO) ln -sfn $(abspath $(BIN))/pddbed /usr/local/bin/pddbed

setup: packages $(VENV)/.installed link  ## Debian packages, virtual environment, `pddbed` on PATH

QUESTION := A user in Sydney asks a model in Frankfurt a long question. The prompt is read in one datacenter and the answer is written in another, joined by a wide area network. Explain in a few sentences why a relay that starts to answer at once makes the wait shorter.

# The figures of the short run are told as they come out: a machine that is busy may miss one (status 1).
demo: setup  ## a question across two datacenters, asked again with warm caches, and the KV transfer's published medians
	@$(PDDBED) model get smollm2-135m
	@trap '$(PDDBED) down demo' EXIT; set -e; \
	$(PDDBED) up topologies/two-dc.yaml --name demo --api auto; \
	for time in first second; do echo "the $$time time:"; $(PDDBED) ask --lab demo --max-tokens 48 "$(QUESTION)"; done
	@$(PDDBED) experiment run skew --quick --out $$(mktemp -d -t pddbed-demo.XXXX)/skew || [ $$? = 1 ]

test: setup lint  ## lint, types, and every test, on this kernel and in the VM
	@tests/run

# A machine with CUDA has a PyTorch of its own: PYTHON's, where that finds a device.
gpu-test:  ## the same workers on CUDA, over loopback; says so where there is none
	@py=$(PYTHON); $$py -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || [ ! -x $(BIN)/python ] || py=$(BIN)/python; \
	$$py -m tests.gpu.run

# libvirt's daemon without its system-wide service: nothing of it runs but as an ordinary user, for as long as the test
vagrant-test: packages $(VENV)/.installed  ## the Vagrantfile really booted (docs/vagrant.md), the lab in it, nothing left
	@$(MAKE) --no-print-directory packages PACKAGES="$(VAGRANT_PACKAGES)"
	@$(SUDO) env PDDBED_CACHE=$(PDDBED_CACHE) PDDBED_VM_PORT=$${PDDBED_VM_PORT:-8000} PDDBED_VM_CPUS=$${PDDBED_VM_CPUS:-2} \
	  PDDBED_VM_MEMORY=$${PDDBED_VM_MEMORY:-3072} $(foreach name,PIP_INDEX_URL PIP_EXTRA_INDEX_URL,$(if $($(name)),$(name)="$($(name))")) \
	  $(abspath $(BIN))/python -m testbed.vagrant

lint: $(VENV)/.installed  ## ruff and mypy
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
