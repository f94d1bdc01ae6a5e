# SPDX-License-Identifier: Apache-2.0

import base64
import contextlib
import copy
import json
from pathlib import Path
import struct
from typing import Any
from unittest import mock
import uuid

from nova import conf as nova_conf
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.scheduler.client import report
from nova.tests.functional.api import client
import oslo_messaging

from nova_pcow.servers import rebuild
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.virt import boot
from tests.unit.nova_pcow import base

_OTHER = '76fa36fc-c930-4bf3-8c8a-ea2a2420deb6'  # of nova.tests' image service
_PUBLIC_KEY = base64.b64encode(
    b''.join(
        # of 3072 bits
        struct.pack('>I', len(part)) + part
        for part in (b'ssh-rsa', b'\1\0\1', b'\0' + b'\xc1' * 384)
    )
).decode()


class RebuildTest(base.ServersTestCase):
    """A server begins anew, or goes on as if nobody had asked."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.start_compute()
        self.glance.images[_OTHER] = copy.deepcopy(self.glance.images[base.IMAGE]) | {'id': _OTHER}
        self.glance.images[_OTHER]['properties']['os_command_line'] = 'of the other image'
        for name in ('first', 'second'):
            self.api.post_keypair(
                {
                    'keypair': {
                        'name': name,
                        'type': 'ssh',
                        'public_key': f'ssh-rsa {_PUBLIC_KEY} {name}',
                    }
                }
            )
        server = self._build_server(
            image_uuid=base.IMAGE,
            flavor_id=self.make_flavor(1088, root='true', data_mb='64'),
            networks='none',
        )
        self.server = self._wait_for_state_change(
            self.api.post_server({'server': server | {'key_name': 'first'}}), 'ACTIVE'
        )
        self.paths = [
            self.pool.existing_path(f'server-{self.server["id"]}-{role}')
            for role in ('root', 'data0')
        ]
        self.uuids = self.find_uuids()
        self.before = self.instance()
        self.before_claims = self.claims(self.server)

    def find_uuids(self) -> list[str | None]:
        return [image.info(path, force_share=True).uuid for path in self.paths]

    def instance(self) -> Any:
        found = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        properties = {
            key: value for key, value in found.system_metadata.items() if key.startswith('image_')
        }
        requested = objects.RequestSpec.get_by_instance_uuid(
            context.get_admin_context(), self.server['id']
        ).image
        return (
            found.image_ref,
            found.kernel_id,
            found.ramdisk_id,
            found.os_type,
            found.architecture,
            found.vm_mode,
            properties,
            found.host,
            found.vm_state,
            found.key_name,
            found.key_data,
            [item.public_key for item in found.keypairs],
            found.trusted_certs and found.trusted_certs.ids,
            requested.id,
            requested.properties.get('os_command_line'),
        )

    def rebuild(self, **arguments: Any) -> str:
        """The words of a refusal, if it was refused."""
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(
                self.server['id'], {'rebuild': {'imageRef': _OTHER} | arguments}
            )
        self.server = self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})
        found = self.api.get_instance_actions(self.server['id'])[0]
        return json.dumps(
            self.api.api_get(
                f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}'
            ).body
        )

    def check_refused(self, words: str, **arguments: Any) -> None:
        self.assertIn(words, self.rebuild(**arguments))
        self.assertEqual('ACTIVE', self.server['status'])
        self.assertEqual(self.uuids, self.find_uuids())
        self.assertEqual(self.before, self.instance())
        self.assertEqual(self.before_claims, self.claims(self.server))

    def test_begins_anew(self) -> None:
        self.rebuild()
        self.assertEqual('ACTIVE', self.server['status'])
        self.assertEqual(_OTHER, self.server['image']['id'])
        self.assertTrue(set(self.uuids).isdisjoint(self.find_uuids()))
        self.assertIn('of the other image', self.xml(self.server))

    def test_image_without_kernel(self) -> None:
        """On a host without a boot shim; the server can be rebooted with its own kernel, and
        rebuilt when there is one.
        """
        properties = self.glance.images[_OTHER]['properties']
        for name in ('kernel_id', 'ramdisk_id'):
            del properties[name]
        file = self.shim / 'kernel'
        file.unlink()
        self.check_refused(f'the boot shim {self.shim} was not found')
        self._reboot_server(self.server, hard=True)
        self.assertIn('root=/dev/pmem0', self.xml(self.server))
        self.assertNotIn(str(self.shim), self.xml(self.server))
        file.touch()
        self.test_begins_anew()
        self.assertIn(f'<kernel>{file}</kernel>', self.xml(self.server))
        self.assertIn(
            f'{boot.SHIM_CMDLINE} -- swiotlb=noforce of the other image<', self.xml(self.server)
        )
        self.before, self.uuids = self.instance(), self.find_uuids()
        # has no template
        self.glance.images[_OTHER].update(disk_format='vmdk', checksum='fedcba98765432100123')
        self.check_refused('its format is vmdk')

    def test_damaged_image(self) -> None:
        self.source.write_bytes(b'QFI\xfb' + b'\xff' * 70000)
        self.check_refused('cannot become a template')

    def test_no_emulator(self) -> None:
        (self.directory / 'qemu').unlink()
        self.check_refused(f'{self.directory}/qemu')

    def test_root_on_which_something_stands(self) -> None:
        image.snapshot_create(self.paths[0], 's')
        device.create_on(self.pool, 'fork', Path(self.paths[0]).stem, base_snapshot='s')
        self.check_refused('because something stands on it (fork)')

    def test_image_that_glance_does_not_give(self) -> None:
        driver = self.computes['compute1'].driver
        error = nova_exception.ImageNotAuthorized(image_id=_OTHER)
        with mock.patch.object(driver._image_api, 'get', side_effect=error):
            self.check_refused('Not authorized for image')
        # what fetches it has an OSError then, as of a file system that is full
        self.source.unlink()
        self.check_refused('No such file or directory')

    def test_preserve_ephemeral(self) -> None:
        self.check_refused('nothing of it outlives a rebuild', preserve_ephemeral=True)

    def test_other_key(self) -> None:
        """And certificates: they are as large as they are, and in as many pieces as it takes."""
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        instance.trusted_certs = objects.TrustedCerts(
            ids=[str(uuid.uuid4()) for _number in range(20)]
        )
        rebuild.keep_image(instance)
        instance.save()
        self.before = self.instance()
        self.glance.images[_OTHER]['disk_format'] = 'vmdk'
        self.check_refused(
            'its format is vmdk', key_name='second', trusted_image_certificates=['other']
        )
        self.check_refused('its format is vmdk', key_name=None, trusted_image_certificates=None)

    def break_rebuild(self) -> None:
        """When all that the server had is deleted."""
        with mock.patch(
            'nova.virt.libvirt.guest.Guest.launch',
            side_effect=nova_exception.InternalError('no such luck'),
        ):
            self.rebuild()
        self.assertEqual('ERROR', self.server['status'])
        self.assertEqual([], self.images())

    def test_rebuild_of_what_could_not_be_rebuilt(self) -> None:
        self.break_rebuild()
        self._run_periodics()
        self.assertEqual(self.before_claims, self.claims(self.server))
        self.test_begins_anew()
        self._run_periodics()
        self.assertEqual(self.before_claims, self.claims(self.server))
        self.assertEqual({}, self.noted())
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        self.assertEqual(
            [], [key for key in instance.system_metadata if key.startswith('pcow-claim')]
        )

    def break_rebuild_and_claim(self) -> None:
        """As :meth:`break_rebuild`, and it is not back yet, because placement is away."""
        with mock.patch.object(
            report.SchedulerReportClient,
            'put_allocations',
            side_effect=nova_exception.PlacementAPIConnectFailure,
        ):
            self.break_rebuild()
        self.assertEqual({}, self.claims(self.server))

    def test_rebuild_at_once_of_what_could_not_be_rebuilt(self) -> None:
        self.break_rebuild_and_claim()
        self.test_begins_anew()
        self.assertEqual(self.before_claims, self.claims(self.server))

    def test_claim_that_another_has_taken(self) -> None:
        self.break_rebuild_and_claim()
        with mock.patch.object(report.SchedulerReportClient, 'put_allocations', return_value=False):
            self.assertIn('which does not give it back', self.rebuild())
        self.assertEqual({}, self.claims(self.server))
        self.test_begins_anew()
        self.assertEqual(self.before_claims, self.claims(self.server))

    def test_claim_that_was_lost_before_a_restart(self) -> None:
        self.break_rebuild_and_claim()
        self.restart_compute_service('compute1')
        self._run_periodics()
        self.assertEqual(self.before_claims, self.claims(self.server))
        self.test_begins_anew()

    def test_reboot_of_what_could_not_be_rebuilt(self) -> None:
        self.break_rebuild()
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})
        self.assertIn('rebuild the server', self.fault(self.server))
        # what it is to begin anew with
        self.assertEqual(_OTHER, self.api.get_server(self.server['id'])['image']['id'])
        self.test_begins_anew()

    def test_reboot_of_what_was_killed_while_it_was_rebuilt(self) -> None:
        """It has the new root then, which goes with the new kernel."""
        with (
            mock.patch('nova_pcow.servers.storage.discard'),
            mock.patch('nova_pcow.servers.storage.delete', return_value=True) as delete,
        ):
            delete.side_effect = lambda *_args, **_kwargs: self.delete_once()
            with mock.patch(
                'nova.virt.libvirt.guest.Guest.launch',
                side_effect=nova_exception.InternalError('killed'),
            ):
                self.rebuild()
        self.assertTrue(set(self.uuids).isdisjoint(self.find_uuids()))
        self.server = self._reboot_server(self.server, hard=True)
        self.assertIn('of the other image', self.xml(self.server))
        self.assertEqual(_OTHER, self.server['image']['id'])

    def delete_once(self) -> bool:
        """What is there before the rebuild."""
        if self.uuids[0] in self.find_uuids():
            for path in self.paths:
                Path(path).unlink()
        return True

    def refuse_by_scheduler(self) -> None:
        """Nova tells no host, and takes back a part of what its API has changed."""
        with mock.patch(
            'nova.conductor.manager.ComputeTaskManager._schedule_instances',
            side_effect=nova_exception.NoValidHost(reason=''),
        ):
            self.rebuild(key_name='second')
        self.assertEqual('ERROR', self.server['status'])
        self.assertEqual(self.uuids, self.find_uuids())

    def test_reboot_after_a_rebuild_without_a_host(self) -> None:
        self.refuse_by_scheduler()
        self.server = self._reboot_server(self.server, hard=True)
        self.assertNotIn('of the other image', self.xml(self.server))
        self.assertEqual(self.before, self.instance())

    def test_reboot_after_a_rebuild_without_a_host_or_kernel(self) -> None:
        properties = self.glance.images[_OTHER]['properties']
        for name in ('kernel_id', 'ramdisk_id', 'os_command_line'):
            del properties[name]
        self.refuse_by_scheduler()
        self.server = self._reboot_server(self.server, hard=True)
        self.assertIn('<kernel>', self.xml(self.server))
        self.assertEqual(self.before, self.instance())

    def test_reboot_without_conductor(self) -> None:
        """One of a cell has no way to the requests."""
        self.refuse_by_scheduler()
        with mock.patch(
            'nova.objects.RequestSpec.save',
            side_effect=oslo_messaging.RemoteError('CantStartEngineError'),
        ):
            self.server = self._reboot_server(self.server, hard=True)
        self.assertEqual(self.before[:-2], self.instance()[:-2])

    def test_reboot_without_kernel(self) -> None:
        """When nobody knows what the server has begun with, and the host has no boot shim: it runs
        on.
        """
        (self.shim / 'kernel').unlink()
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        instance.kernel_id = ''
        instance.system_metadata = {
            key: value
            for key, value in instance.system_metadata.items()
            if not key.startswith('pcow:')
        }
        instance.save()
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_server_parameter(
            self.server, {'status': 'ACTIVE', 'OS-EXT-STS:task_state': None}
        )
        fault = objects.InstanceFault.get_latest_for_instance(
            context.get_admin_context(), instance.uuid
        )
        self.assertIn('was not found', fault.message)
        driver = self.computes['compute1'].driver
        self.assertTrue(driver._host.get_guest(instance).is_active())

    def test_reboot_keeps_what_an_operator_has_changed(self) -> None:
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        # nova-manage image_property set
        instance.system_metadata['image_os_distro'] = 'debian'
        instance.save()
        self._reboot_server(self.server, hard=True)
        instance.refresh()
        self.assertEqual('debian', instance.system_metadata['image_os_distro'])

    def test_unshelved(self) -> None:
        """It does not begin with the image that Nova makes, and deletes again, in order to shelve
        it.
        """
        nova_conf.CONF.set_override('shelve_drops_data', True, 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'shelve_drops_data', 'nova_pcow')
        with mock.patch('nova_pcow.driver.PcowLibvirtDriver.snapshot'):
            self.server = self._shelve_server(self.server)
        shelved = self.glance.images[self.server_image()]
        shelved.update(
            {
                key: self.glance.images[base.IMAGE][key]
                for key in ('disk_format', 'checksum', 'size')
            }
        )
        self._unshelve_server(self.server)
        self.uuids, self.before_claims = self.find_uuids(), self.claims(self.server)
        self.glance.images[_OTHER]['disk_format'] = 'vmdk'
        self.check_refused('its format is vmdk')

    def server_image(self) -> str:
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        return str(instance.system_metadata['shelved_image_id'])

    def noted(self) -> Any:
        return self.computes['compute1'].driver._lost_claims._noted

    def test_claim_that_comes_back_later(self) -> None:
        """While placement is away, or something else is being done with the server."""
        self.glance.images[_OTHER]['disk_format'] = 'vmdk'
        with mock.patch.object(
            report.SchedulerReportClient,
            'put_allocations',
            side_effect=nova_exception.PlacementAPIConnectFailure,
        ):
            self.rebuild()
        self.assertEqual({}, self.claims(self.server))
        self._run_periodics()
        self.assertEqual(self.before_claims, self.claims(self.server))
        self._delete_server(self.server)
        self._run_periodics()
        self.assertEqual({}, self.claims(self.server))
