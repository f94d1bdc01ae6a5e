# SPDX-License-Identifier: Apache-2.0
"""Volumes of Cinder's, by its API, and their attachment to servers by Nova's."""

from __future__ import annotations

from typing import Any

from pcow_driver.common import exception
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import servers

TYPE = 'pcow-pmem'


class Volume:
    def __init__(self, api: api_module.Api, uuid: str) -> None:
        self.api = api
        self.id = uuid

    @classmethod
    def create(
        cls,
        api: api_module.Api,
        name: str,
        size: int,
        near: servers.Server | None = None,
        **source: str,
    ) -> Volume:
        """Make a volume, and wait until it can be used.

        :param size: GiB
        :param near: make it on the host of this server
        :param source: snapshot_id, source_volid or imageRef
        :raises PcowError:
        """
        wanted = {'name': name, 'size': size, 'volume_type': TYPE, **source}
        made = cls(api, str(_post(api, 'volumes', volume=wanted, **hints(near))['volume']['id']))
        made.wait_status('available')
        return made

    def _path(self, kind: str = 'volumes') -> str:
        return f'/{self.api.project()}/{kind}'

    def show(self) -> dict[str, Any]:
        return dict(self.api.call('cinder', 'GET', f'{self._path()}/{self.id}')['volume'])

    def host(self) -> str:
        return str(self.show()['os-vol-host-attr:host']).partition('@')[0]

    def wait_status(self, status: str) -> None:
        """:raises ServerFailed: it gets no such status in time, or an error"""

        def look() -> bool | None:
            found = str(self.show()['status'])
            if found.startswith('error') and found != status:
                raise servers.ServerFailed(reason=f'volume {self.id}: status {found}')
            return True if found == status else None

        servers.wait(f'status {status} of volume {self.id}', look)

    def act(self, action: str, **values: Any) -> Any:
        """:raises PcowError: Cinder refuses"""
        return self.api.call('cinder', 'POST', f'{self._path()}/{self.id}/action', {action: values})

    def messages(self) -> list[str]:
        """What Cinder tells its user about requests that failed later, the newest last."""
        found = self.api.call('cinder', 'GET', f'{self._path("messages")}?resource_uuid={self.id}')[
            'messages'
        ]
        return [
            str(message['user_message'])
            for message in sorted(found, key=lambda message: str(message['created_at']))
        ]

    def snapshot(self, name: str) -> str:
        """Make a snapshot, also while it is attached, and return its ID."""
        made = str(
            _post(
                self.api, 'snapshots', snapshot={'volume_id': self.id, 'name': name, 'force': True}
            )['snapshot']['id']
        )
        self._wait_snapshot(made)
        return made

    def _wait_snapshot(self, snapshot: str) -> None:
        def look() -> bool | None:
            status = self.api.call('cinder', 'GET', f'{self._path("snapshots")}/{snapshot}')[
                'snapshot'
            ]['status']
            if status.startswith('error'):
                raise servers.ServerFailed(
                    reason=f'snapshot {snapshot} of volume {self.id}: status {status}'
                )
            return True if status == 'available' else None

        servers.wait(f'snapshot {snapshot} of volume {self.id}', look)

    def manage_snapshot(self, snapshot: str) -> str:
        """Have Cinder forget a snapshot, and give it that again; returns its new ID."""
        self.api.call(
            'cinder', 'POST', f'{self._path("snapshots")}/{snapshot}/action', {'os-unmanage': {}}
        )
        self._wait_gone('snapshots', snapshot)
        made = str(
            _post(
                self.api,
                'os-snapshot-manage',
                snapshot={
                    'volume_id': self.id,
                    'name': 'managed',
                    'ref': {'source-name': f'snapshot-{snapshot}'},
                },
            )['snapshot']['id']
        )
        self._wait_snapshot(made)
        return made

    def delete_snapshot(self, snapshot: str) -> None:
        """Delete one and wait until it is gone."""
        self.api.call('cinder', 'DELETE', f'{self._path("snapshots")}/{snapshot}')
        self._wait_gone('snapshots', snapshot)

    def backup(self, name: str) -> str:
        """Make a backup, also while it is attached, and return its ID."""
        made = str(
            _post(self.api, 'backups', backup={'volume_id': self.id, 'name': name, 'force': True})[
                'backup'
            ]['id']
        )
        self._wait_backup(made)
        return made

    def restore(self, backup: str) -> None:
        """Have it hold what a backup holds."""
        _post(self.api, f'backups/{backup}/restore', restore={'volume_id': self.id})
        self._wait_backup(backup)
        self.wait_status('available')

    def _wait_backup(self, backup: str) -> None:
        def look() -> bool | None:
            found = self.api.call('cinder', 'GET', f'{self._path("backups")}/{backup}')['backup']
            if found['status'] == 'error':
                raise servers.ServerFailed(reason=f'backup {backup}: {found["fail_reason"]}')
            return True if found['status'] == 'available' else None

        servers.wait(f'backup {backup}', look)

    def attach(self, server: servers.Server) -> None:
        """:raises PcowError: Nova or Cinder refuses"""
        self.api.call(
            'nova',
            'POST',
            f'/servers/{server.id}/os-volume_attachments',
            {'volumeAttachment': {'volumeId': self.id}},
        )
        self.wait_status('in-use')

    def detach(self, server: servers.Server) -> None:
        """Ask for it; it is not waited for.

        :raises PcowError: Nova refuses at once
        """
        self.api.call('nova', 'DELETE', f'/servers/{server.id}/os-volume_attachments/{self.id}')

    def delete(self) -> None:
        """Delete it and wait until it is gone."""
        self.api.call('cinder', 'DELETE', f'{self._path()}/{self.id}')
        self._wait_gone('volumes', self.id)

    def _wait_gone(self, kind: str, uuid: str) -> None:
        def look() -> bool | None:
            found = {
                item['id']: item['status']
                for item in self.api.call('cinder', 'GET', f'{self._path(kind)}/detail')[kind]
            }
            if found.get(uuid, '').startswith('error'):
                raise servers.ServerFailed(reason=f'{kind} {uuid}: status {found[uuid]}')
            return True if uuid not in found else None

        servers.wait(f'end of {kind} {uuid}', look)


def hints(near: servers.Server | None) -> dict[str, Any]:
    """What a request for a volume says beside it, so that it is made on the host of a server
    (InstanceLocalityFilter).
    """
    return {'OS-SCH-HNT:scheduler_hints': {'local_to_instance': near.id}} if near else {}


def delete_backup(api: api_module.Api, backup: str) -> None:
    """Delete one and wait until it is gone."""
    path = f'/{api.project()}/backups'
    api.call('cinder', 'DELETE', f'{path}/{backup}')

    def look() -> bool | None:
        return (
            True
            if backup not in {item['id'] for item in api.call('cinder', 'GET', path)['backups']}
            else None
        )

    servers.wait(f'end of backup {backup}', look)


def delete_type(api: api_module.Api, name: str) -> None:
    path = f'/{api.project()}/types'
    for item in api.call('cinder', 'GET', path)['volume_types']:
        if item['name'] == name:
            api.call('cinder', 'DELETE', f'{path}/{item["id"]}')


def _post(api: api_module.Api, kind: str, **body: Any) -> Any:
    try:
        return api.call('cinder', 'POST', f'/{api.project()}/{kind}', body)
    except exception.PcowError as e:
        raise servers.ServerFailed(reason=str(e)) from None
