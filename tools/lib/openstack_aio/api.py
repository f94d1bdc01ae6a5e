# SPDX-License-Identifier: Apache-2.0
"""The few requests to OpenStack's APIs that setting it up takes, over HTTP on the loopback
interface.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
import urllib.error
import urllib.request

from pcow_driver.common import exception
from tools.lib.openstack_aio import settings as settings_module

_TIMEOUT = 60.0  # seconds
# what requests are written for; Nova checks extra specs from this on
NOVA_VERSION = '2.86'
_CINDER_VERSION = '3.59'
_ROLES = ('service', 'admin', 'member', 'reader')


class Api:
    """As the user admin of the project admin."""

    def __init__(self, settings: settings_module.Settings) -> None:
        self._settings = settings
        self._token = ''
        # an all-in-one is never behind a proxy
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def log_in(self) -> None:
        """:raises PcowError:"""
        domain = {'id': 'default'}
        user = {'name': 'admin', 'domain': domain, 'password': self._settings.password}
        _body, headers = self._request(
            'keystone',
            'POST',
            '/auth/tokens',
            {
                'auth': {
                    'identity': {'methods': ['password'], 'password': {'user': user}},
                    'scope': {'project': {'name': 'admin', 'domain': domain}},
                }
            },
        )
        self._token = str(headers['X-Subject-Token'])

    def call(self, service: str, method: str, path: str, body: Any = None) -> Any:
        """One request; returns the decoded answer, None if it is empty.

        :param body: for JSON; a path for the content of that file
        :param path: what follows the URL of the catalog
        :raises PcowError: the service refuses, or does not answer
        """
        return self._request(service, method, path, body)[0]

    def _request(self, service: str, method: str, path: str, body: Any) -> tuple[Any, Any]:
        headers = {
            'X-Auth-Token': self._token,
            'Content-Type': 'application/json',
            'X-OpenStack-Nova-API-Version': NOVA_VERSION,
            'OpenStack-API-Version': f'volume {_CINDER_VERSION}',
        }
        data: Any = None
        if isinstance(body, Path):  # its content
            headers |= {
                'Content-Type': 'application/octet-stream',
                'Content-Length': str(body.stat().st_size),
            }
            with open(body, 'rb') as data:
                return self._send(service, method, path, data, headers)
        if body is not None:
            data = json.dumps(body).encode()
        return self._send(service, method, path, data, headers)

    def _send(
        self, service: str, method: str, path: str, data: Any, headers: dict[str, str]
    ) -> tuple[Any, Any]:
        url = self._settings.url(service) + path
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - the URL is our own
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                text = answer.read()
                return json.loads(text) if text else None, answer.headers
        except urllib.error.HTTPError as e:
            reason = e.read().decode(errors='replace')[:500]
            raise exception.PcowError(
                reason=f'{service} refuses {method} {path}: {e.code} {reason}'
            ) from None
        except OSError as e:
            raise exception.PcowError(
                reason=f'{service} does not answer {method} {path}: {e}'
            ) from None

    def fill_catalog(self) -> None:
        """Users, roles and endpoints of the services, as far as they are not there.

        :raises PcowError:
        """

        def named(path: str, key: str, query: str = '') -> dict[str, str]:
            return {
                item['name']: item['id'] for item in self.call('keystone', 'GET', path + query)[key]
            }

        def create(path: str, key: str, **values: Any) -> str:
            return str(self.call('keystone', 'POST', path, {key: values})[key]['id'])

        roles = named('/roles', 'roles')
        for name in _ROLES:
            if name not in roles:
                roles[name] = create('/roles', 'role', name=name)
        projects, users, services = (
            named('/projects', 'projects'),
            named('/users', 'users'),
            named('/services', 'services'),
        )
        project = projects.get('service') or create(
            '/projects', 'project', name='service', domain_id='default'
        )
        for name, (kind, _suffix) in settings_module.SERVICE_TYPES.items():
            user = users.get(name) or create(
                '/users', 'user', name=name, password=self._settings.password, domain_id='default'
            )
            for role in ('admin', 'service'):
                self.call(
                    'keystone', 'PUT', f'/projects/{project}/users/{user}/roles/{roles[role]}'
                )
            if name not in services:
                service = create('/services', 'service', name=name, type=kind)
                for interface in ('public', 'internal', 'admin'):
                    create(
                        '/endpoints',
                        'endpoint',
                        service_id=service,
                        interface=interface,
                        url=self._settings.url(name),
                        region_id=settings_module.REGION,
                    )

    def services(self, service: str) -> dict[tuple[str, str], str]:
        """When each agent of nova or cinder reported last (ISO 8601, UTC, or empty): by its name
        and its host.
        """
        found = self.call(service, 'GET', '/os-services')['services']
        return {
            (item['binary'], item['host']): item['updated_at'] or ''
            for item in found
            if item['state'] == 'up'
        }

    def hypervisors(self) -> set[str]:
        return {
            str(item['hypervisor_hostname'])
            for item in self.call('nova', 'GET', '/os-hypervisors')['hypervisors']
        }

    def volume_pools(self) -> set[str]:
        """Those that cinder's scheduler knows: HOST@BACKEND#POOL."""
        return {
            str(item['name'])
            for item in self.call('cinder', 'GET', f'/{self.project()}/scheduler-stats/get_pools')[
                'pools'
            ]
        }

    def volume_types(self) -> set[str]:
        return {
            str(item['name'])
            for item in self.call('cinder', 'GET', f'/{self.project()}/types')['volume_types']
        }

    def create_volume_type(self, name: str, backend: str) -> None:
        self.call(
            'cinder',
            'POST',
            f'/{self.project()}/types',
            {'volume_type': {'name': name, 'extra_specs': {'volume_backend_name': backend}}},
        )

    def project(self) -> str:
        """ID of the project that everything is done in; part of cinder's paths."""
        (project,) = [
            item['id'] for item in self.call('keystone', 'GET', '/projects?name=admin')['projects']
        ]
        return str(project)

    def upload_image(self, name: str, path: Path, disk_format: str, **properties: str) -> str:
        """Make an image for all projects, or take the one of this name; returns its ID.

        :raises PcowError:
        """
        found = self.call('glance', 'GET', f'/v2/images?name={name}&status=active')['images']
        if found:
            return str(found[0]['id'])
        container = disk_format if disk_format in ('aki', 'ari') else 'bare'
        image = str(
            self.call(
                'glance',
                'POST',
                '/v2/images',
                {
                    'name': name,
                    'disk_format': disk_format,
                    'container_format': container,
                    'visibility': 'public',
                    **properties,
                },
            )['id']
        )
        self.call('glance', 'PUT', f'/v2/images/{image}/file', path)
        return image

    def create_flavor(self, name: str, memory: int, disk: int, specs: dict[str, str]) -> None:
        """Make a flavor that is not there.

        :param memory: MiB
        :param disk: GiB
        """
        if name in {item['name'] for item in self.call('nova', 'GET', '/flavors')['flavors']}:
            return
        flavor = self.call(
            'nova',
            'POST',
            '/flavors',
            {'flavor': {'name': name, 'ram': memory, 'vcpus': 1, 'disk': disk}},
        )['flavor']['id']
        if specs:
            self.call('nova', 'POST', f'/flavors/{flavor}/os-extra_specs', {'extra_specs': specs})
