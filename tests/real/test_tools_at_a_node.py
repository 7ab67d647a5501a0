"""A node that runs, as openssl and promtool see it from outside."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.together import together

pytestmark = pytest.mark.namespaces_long
CONTROL_PORT = 52415
FETCH = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_gets_no_further_than_the_door_and_the_node_says_who_was_not_let_in(tmp_path: Path) -> None:
    with together(tmp_path, "ab") as cluster:
        a, b = cluster.lan
        cluster.write(2, 10)
        (node,) = cluster.start("b")
        node.says("is node")
        calls = [
            ((), "a call was not taken: .*showed no certificate"),
            (("-tls1_2",), "a call was not taken: .*does not speak TLS 1.3"),
        ]
        for more, told in calls:
            a.start("openssl", "s_client", "-connect", f"{b.ip}:{CONTROL_PORT}", *more).ends()
            node.says(told)
        key, cert = (a.folder / f"stranger.{part}" for part in ("key", "crt"))
        make = ("openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=stranger", "-days", "2")
        subprocess.run([*make, "-keyout", key, "-out", cert], capture_output=True, check=True)
        own = ("-cert", str(cert), "-key", str(key))
        a.start("openssl", "s_client", "-connect", f"{b.ip}:{CONTROL_PORT}", *own).ends()
        node.says("a call was not taken: .*our authority did not sign its certificate")
        assert node.running


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed")
def test_promtool_has_nothing_to_complain_about_while_two_nodes_train(tmp_path: Path) -> None:
    with together(tmp_path, "ab") as cluster:
        a, b = cluster.lan
        job = str(cluster.write(2, 1_000_000))
        command = ("run", "--real", job, "--set", "device=cpu", "--set", "metrics=9400", "--set")
        nodes = [machine.hcsim(*command, f"name={machine.name}") for machine in (a, b)]
        nodes[0].says("training begins")
        page = a.start(sys.executable, "-c", FETCH, "http://127.0.0.1:9400/metrics")
        assert page.ends() == 0, page.text
        assert "hcsim_link_sent_bytes_total{" in page.text
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=page.text + "\n", capture_output=True, text=True, timeout=240
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
