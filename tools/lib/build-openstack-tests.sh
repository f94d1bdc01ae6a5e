# SPDX-License-Identifier: Apache-2.0
# Sourced: build/openstack-tests, the Python environment of tools/openstack-aio with what the tests of the drivers need on top.

build_openstack_tests() {
    local venv=$build/openstack-tests base inputs
    base=$(cd "$top" && "$build/venv/bin/python" -c '
import sys
from tools.lib.openstack_aio import environment
print(environment.prepare_base(lambda text: print(text, file=sys.stderr)).openstack)')
    inputs=$(echo "$base"; cat "$top"/nova_pcow/{test-requirements.txt,nova_pcow.pth} "$top"/{setup.cfg,tools/lib/build-openstack-tests.sh})
    if [[ -e $venv/.inputs && $(<"$venv/.inputs") == "$inputs" ]]; then
        return 0
    fi
    step "making the Python environment build/openstack-tests"
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv"
    # addsitedir, unlike a plain path, also reads the .pth files there; what is installed here comes first
    printf 'import site; site.addsitedir("%s")\n' "$base"/lib/python3*/site-packages \
        >"$(echo "$venv"/lib/python3*/site-packages)/openstack.pth"
    run "$build/logs/pip-openstack-tests.log" "$venv/bin/pip" install --disable-pip-version-check -r "$top/nova_pcow/test-requirements.txt"
    git -C "$top" rev-parse HEAD >/dev/null 2>&1 || export PBR_VERSION=${PBR_VERSION:-0.1.0}
    run "$build/logs/pip-openstack-tests.log" "$venv/bin/pip" install --disable-pip-version-check --no-deps -e "$top"
    printf '%s' "$inputs" >"$venv/.inputs"
}
