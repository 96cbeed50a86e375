"""Answers for the names of services and of a stateful set's pods, in place of CoreDNS.

`python -m tests.cluster.names KUBECONFIG CERTIFICATE HOSTS ADDRESS` keeps a file of hosts as the
API has them, and has dnsmasq serve it on the address.
"""

import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import yaml

DOMAIN = "cluster.local"
_EVERY_S = 1.0


def hosts(services: Sequence[dict[str, Any]], slices: Sequence[dict[str, Any]]) -> str:
    """Lines of a hosts file for these objects of the API."""
    headless = {_key(each): each for each in services if each["spec"].get("clusterIP") == "None"}
    lines = {
        f"{each['spec']['clusterIP']} {_name(*_key(each))}"
        for each in services
        if each["spec"].get("clusterIP", "None") != "None"
    }
    for each in slices:
        metadata = each["metadata"]
        service = metadata.get("labels", {}).get("kubernetes.io/service-name", "")
        found = headless.get((metadata["namespace"], service))
        if found is not None:
            lines |= set(_of_pods(each, found))
    return "".join(f"{line}\n" for line in sorted(lines))


def _of_pods(endpoints: dict[str, Any], service: dict[str, Any]) -> Iterator[str]:
    name = _name(*_key(service))
    are_all_named = service["spec"].get("publishNotReadyAddresses", False)
    for each in endpoints.get("endpoints") or ():
        if not (each["conditions"].get("ready") or are_all_named):
            continue
        for address in each["addresses"]:
            yield f"{address} {name}"
            if "hostname" in each:
                yield f"{address} {each['hostname']}.{name}"


def _key(service: dict[str, Any]) -> tuple[str, str]:
    return service["metadata"]["namespace"], service["metadata"]["name"]


def _name(namespace: str, service: str) -> str:
    return f"{service}.{namespace}.svc.{DOMAIN}"


def main(kubeconfig: Path, certificate: Path, file: Path, address: str) -> None:
    """Serve names until a signal."""
    known = yaml.safe_load(kubeconfig.read_text())
    url, token = known["clusters"][0]["cluster"]["server"], known["users"][0]["user"]["token"]
    checked = ssl.create_default_context(cafile=str(certificate))

    def items(path: str) -> list[dict[str, Any]]:
        request = Request(f"{url}{path}", headers={"Authorization": f"Bearer {token}"})
        with urlopen(request, timeout=10, context=checked) as answer:
            return json.load(answer)["items"]

    file.write_text("")
    command = ["dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv"]
    command += ["--no-hosts", f"--addn-hosts={file}", f"--local=/{DOMAIN}/", "--local-ttl=1"]
    command += [f"--listen-address={address}", "--bind-interfaces", "--user=root", "--pid-file="]
    with subprocess.Popen(command) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        while server.poll() is None:
            try:
                found = hosts(items("/api/v1/services"), items(f"/apis/{_SLICES}"))
            except (URLError, TimeoutError) as error:
                sys.stderr.write(f"{error}\n")
            else:
                if found != file.read_text():
                    file.write_text(found)
                    server.send_signal(signal.SIGHUP)
            time.sleep(_EVERY_S)


_SLICES = "discovery.k8s.io/v1/endpointslices"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
