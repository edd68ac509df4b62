"""What can be compared: a pipeline of `workers.policy`, and how KV is sent. Pure values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """`chunked`: KV leaves while prefill computes, not after. `end_on_rld`: what ends on the relay goes no further."""

    name: str
    policy: str
    chunked: bool = False
    end_on_rld: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("pdd", "pdd"),
        Variant("cdc-pd", "cdc-pd"),
        Variant("idc-pd", "idc-pd"),
        Variant("pdd-chunked", "pdd", chunked=True),
        Variant("cdc-pd-chunked", "cdc-pd", chunked=True),
        Variant("pdd-end-on-rld", "pdd", end_on_rld=True),
        Variant("prfaas", "prfaas"),
    )
}
