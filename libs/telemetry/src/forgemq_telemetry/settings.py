"""Settings of the exporters; read from `FORGEMQ_TELEMETRY_*`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TelemetrySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By default nothing is exported."""

    exporter: Annotated[
        Literal["none", "otlp", "prometheus"],
        Meta(description="otlp: metrics and traces, pushed; prometheus: metrics, scraped."),
    ] = "none"
    endpoint: Annotated[str, Meta(description="Collector's OTLP/HTTP address, no path.")] = (
        "http://127.0.0.1:4318"
    )
    host: Annotated[str, Meta(description="Prometheus: address to listen on.")] = "127.0.0.1"
    port: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=65535,
                description="Prometheus: where to listen; 0 takes a free port and reports it. "
                "None: the service's own place behind port_base.",
            ),
        ]
        | None
    ) = None
    port_base: Annotated[
        int,
        Meta(
            ge=1024,
            le=65336,
            description="Prometheus: 200 ports from here on are those of one run on one machine.",
        ),
    ] = 9600
    number: Annotated[
        int,
        Meta(
            ge=0,
            description="Prometheus: of this process among those of its service on one machine.",
        ),
    ] = 0
    export_every_s: Annotated[float, Meta(gt=0, description="OTLP: metrics interval.")] = 10.0
    sampled_fraction: Annotated[
        float, Meta(ge=0, le=1, description="Share of traces; every service keeps the same.")
    ] = 1.0
    links_max: Annotated[
        int, Meta(ge=1, description="Links of one span: a step links all its completions.")
    ] = 65_536
