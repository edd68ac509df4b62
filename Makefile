# pddbed: `make demo` and `make test` are complete on a fresh Debian or Ubuntu machine, as root or with sudo.
# The first call installs Debian packages and a virtual environment; later calls are fast.

SHELL   := /bin/bash
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
SUDO    := $(shell [ $$(id -u) = 0 ] || echo sudo)
PDDBED  := $(SUDO) $(abspath $(BIN))/pddbed

# network: mininet's mnexec, tools that users run inside hosts; vm: a kernel with netem under QEMU; a font for pictures
PACKAGES := mininet iproute2 iputils-ping iperf3 ethtool procps curl tcpdump python3-venv \
            qemu-system-x86 busybox-static kmod fonts-dejavu-core

VAGRANT_PACKAGES := vagrant vagrant-libvirt libvirt-daemon libvirt-clients qemu-system-x86 qemu-utils mmdebstrap \
                    debian-archive-keyring e2fsprogs rsync openssh-client git

.PHONY: help packages link setup demo test test-all fresh-test gpu-test vagrant-test lint clean
.DEFAULT_GOAL := help

help:  ## this text
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

# Without root and without sudo only what is there can be used: what is missing is named, with the command for root.
packages:
	@missing=(); for p in $(PACKAGES); do \
	  [[ $$(dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null) == installed ]] || missing+=($$p); done; \
	(( $${#missing[@]} )) || exit 0; \
	command -v apt-get >/dev/null || { echo "make: this is not Debian or Ubuntu; install the equivalents of: $${missing[*]}" >&2; exit 1; }; \
	[[ -z "$(SUDO)" ]] || command -v sudo >/dev/null || { echo "make: no sudo here; as root: apt-get install --no-install-recommends $${missing[*]}" >&2; exit 1; }; \
	echo "installing Debian packages: $${missing[*]}"; log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	$(SUDO) env DEBIAN_FRONTEND=noninteractive bash -c 'apt-get -q update && apt-get -q install -y --no-install-recommends "$$@"' - "$${missing[@]}" >"$$log" 2>&1 \
	  || { tail -20 "$$log" >&2; exit 1; }

# The stamp holds what was installed, so that a change of the dependencies installs again.
$(VENV)/.installed: pyproject.toml constraints.txt | packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; set PYTHON=" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m testbed.doctor.torch_build
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' >$(VENV)/install.log 2>&1 || { tail -20 $(VENV)/install.log >&2; exit 1; }
	@touch $@

# sudo's PATH lacks a virtual environment. Another clone's link stays: `make link TAKE=1` takes it over.
link: $(VENV)/.installed
	@link=/usr/local/bin/pddbed; mine=$(abspath $(BIN))/pddbed; there=$$(readlink $$link || true); \
	if [[ "$$there" == "$$mine" ]]; then :; \
	elif [[ -e $$link && -z "$(TAKE)" ]]; then \
	  echo "$$link is $${there:-not a link of this project} and stays as it is; this clone is $$mine (make link TAKE=1 links it)"; \
	elif [[ -z "$(SUDO)" ]] || command -v sudo >/dev/null; then $(SUDO) ln -sfn "$$mine" $$link; \
	else echo "no sudo here, so $$link was not made: call $$mine"; fi

setup: packages $(VENV)/.installed link  ## Debian packages, virtual environment, `pddbed` on PATH

QUESTION := A user in Sydney asks a model in Frankfurt a long question. The prompt is read in one datacenter and the answer is written in another, joined by a wide area network. Explain in a few sentences why a relay that starts to answer at once makes the wait shorter.

# The figures of the short run are told as they come out: a machine that is busy may miss one (status 1).
demo: setup  ## a question across two datacenters, asked again with warm caches, and the KV transfer's published medians
	@$(PDDBED) model get smollm2-135m
	@trap '$(PDDBED) down demo' EXIT; set -e; \
	$(PDDBED) up topologies/two-dc.yaml --name demo --api auto; \
	for time in first second; do echo "the $$time time:"; $(PDDBED) ask --lab demo --max-tokens 48 "$(QUESTION)"; done
	@$(PDDBED) experiment run skew --quick --out runs/demo-$$(date +%Y%m%d-%H%M%S) || [ $$? = 1 ]

test: setup lint  ## lint, types, and the tests of every commit, on this kernel and in the VM (TESTS: arguments of tests/run)
	@tests/run $(TESTS)

test-all: setup lint  ## lint, types, and every test, the nightly ones too
	@tests/run --all $(TESTS)

fresh-test:  ## the README's commands in minimal Debian 12 and 13 root file systems, made anew from packages
	@$(MAKE) --no-print-directory packages PACKAGES="mmdebstrap debian-archive-keyring git ca-certificates"
	@$(SUDO) env $(foreach name,PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT FRESH_TESTS,$(if $($(name)),$(name)="$($(name))")) tests/fresh $(RELEASES)

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

lint: $(VENV)/.installed  ## ruff, mypy, which package imports which, and Markdown at one width (`mdformat` without --check mends it)
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache && $(BIN)/mdformat --check $$(git ls-files '*.md')

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
