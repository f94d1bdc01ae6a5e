# SPDX-License-Identifier: Apache-2.0
"""Servers that go on where they were, with pcow:persist; a real QEMU does in
tests/functional/test_openstack_persist.
"""

from __future__ import annotations

import json
import os
import types
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from nova.compute import vm_states
from nova.tests.functional.api import client
from nova.virt import event as virtevent
from nova.virt.libvirt import utils as libvirt_utils
from oslotest import base as oslotest_base

from nova_pcow.common import flavor
from nova_pcow.servers import persistence
from pcow_driver.common import boot_id
from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_xml
from tests.unit.nova_pcow import base
from tests.unit.nova_pcow import definitions
from tests.unit.nova_pcow import test_ram
from tests.unit.pcow_driver.fixation import entered

State = records.State
BEFORE = 'otherboot/7-1'  # a run of before the host was started
AUTO = automatic.new_name(automatic.PERIODIC)


class ParseTest(oslotest_base.BaseTestCase):
    def test_parse(self) -> None:
        self.assertTrue(test_ram.parse(root='true', ram='true', persist='true').persists)
        self.assertFalse(test_ram.parse(root='true', ram='true', persist='no').persists)
        self.assertFalse(test_ram.parse(root='true', ram='true').persists)

    def test_invalid(self) -> None:
        for specs, words in (
            ({'root': 'true', 'persist': 'true'}, 'pcow:persist without pcow:ram'),
            ({'data_mb': '64', 'persist': 'true'}, 'pcow:persist without pcow:ram'),
            ({'persist': 'true'}, 'pcow:persist without pcow:ram'),
            ({'root': 'true', 'ram': 'true', 'persist': '10s'}, 'pcow:persist is true or false'),
        ):
            error = self.assertRaises(flavor.FlavorInvalid, test_ram.parse, **specs)
            self.assertIn(words, str(error))


class PersistenceCase(test_ram.RamTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.flags(resume_guests_state_on_host_boot=True)
        self.definitions = self.useFixture(definitions.Definitions())
        self.flavor = self.make_persistent_flavor()

    def make_persistent_flavor(self, memory_mb: int = test_ram.RAM_MB, **specs: str) -> str:
        return self.make_ram_flavor(memory_mb, {'pcow:persist': 'true', **specs})

    @property
    def driver(self) -> Any:
        (compute,) = self.computes.values()
        return compute.driver

    def domain(self, server: Any) -> domain.Domain:
        found = self.driver._domain(self.instance(server))
        assert isinstance(found, domain.Domain)
        return found

    def protection(self, server: Any) -> policy.Policy | None:
        """Of its definition."""
        return policy.get(self.domain(server))

    def check_protected(self, server: Any, over: str = '') -> None:
        self.assertEqual(policy.Policy(owner=persistence.OWNER, over=over), self.protection(server))

    def enter(self, server: Any, state: State = State.FIXATED, run: str = BEFORE) -> None:
        """What root's services have noted."""
        entered.enter(
            server['id'],
            records.Record(state, run=run, checkpoint=definitions.MOMENT, reason='no CPU'),
        )

    @staticmethod
    def here() -> str:
        return f'{boot_id.current()}/7-1'

    def actions(self, server: Any) -> list[str]:
        return [str(one['action']) for one in self.api.get_instance_actions(server['id'])]

    def boot_host(self) -> None:
        """nova-compute begins, on a host whose domains are off."""
        self.restart_compute_service('compute1')


class ServerTest(PersistenceCase):
    def test_create(self) -> None:
        server = self.boot(self.flavor)
        self.check_ram(server)
        self.check_protected(server)
        self.assertIn('owner="nova-compute"', self.xml(server))
        other = self.boot(self.make_ram_flavor())
        self.assertIsNone(self.protection(other))

    def test_stop_and_start(self) -> None:
        """One that is stopped has not to go on, whoever has stopped it."""
        server = self.boot(self.flavor)
        self._stop_server(server)
        self.assertIsNone(self.protection(server))
        self.assertIsNotNone(libvirt_xml.ram(self.domain(server).definition()))
        self._start_server(server)
        self.check_protected(server)

    def test_each_start_ends_the_run_before(self) -> None:
        server = self.boot(self.flavor)
        self.enter(server, State.RUNS, self.here())
        self._reboot_server(server, hard=True)
        self.check_protected(server, self.here())
        with mock.patch('nova.virt.libvirt.driver.LibvirtDriver._soft_reboot', return_value=True):
            self.enter(server, State.RUNS, 'another')
            self._reboot_server(server)
        self.check_protected(server, 'another')
        self.enter(server, State.RUNS, 'third')
        with mock.patch('nova_pcow.libvirt_driver.snapshots.SnapshotLibvirtDriver.resume'):
            self.driver.resume(None, self.instance(server), [])
        self.check_protected(server, 'third')

    def test_rescue(self) -> None:
        server = self.boot(self.flavor)
        os.makedirs(libvirt_utils.get_instance_path(self.instance(server)), exist_ok=True)
        self.act(server, 'rescue', {'rescue_image_ref': base.IMAGE})
        self.assertIsNone(self.protection(server))
        self.act(server, 'unrescue')
        self.check_protected(server)

    def test_rebuild(self) -> None:
        server = self.boot(self.flavor)
        self.assertEqual('ACTIVE', self.act(server, 'rebuild', {'imageRef': base.IMAGE})['status'])
        self.check_protected(server)

    def test_evacuate(self) -> None:
        server = self.boot(self.flavor, host='compute1')
        self.start_compute(hostname='compute2')
        self.computes['compute1'].stop()
        self.api.put_service_force_down(self.computes['compute1'].service_ref.uuid, True)
        self.act(server, 'evacuate', {})
        self._wait_for_migration_status(server, ['done'])
        del self.computes['compute1']
        self.assertIsNone(self.protection(server))  # it is stopped there
        self._start_server(server)
        self.check_protected(server)

    def test_resize_to_and_from(self) -> None:
        """Also with checkpoints of pcow's own, which nobody misses."""

        def delete(_found: Any, name: str, path: str) -> None:
            image.snapshot_delete(path, name)

        server = self.boot(self.make_ram_flavor())
        self.resize(server, self.make_persistent_flavor(2 * test_ram.RAM_MB))
        self.check_protected(server)
        with mock.patch.object(domain.Domain, 'snapshot_delete', new=delete):  # as QEMU would
            self.act(server, 'confirmResize')
        self.checkpoints.names.add(AUTO)
        self.take(server, AUTO)
        self.assertEqual('VERIFY_RESIZE', self.resize(server, self.make_ram_flavor())['status'])
        self.check_ram(server)
        self.assertIsNone(self.protection(server))
        self.act(server, 'revertResize')
        self.check_protected(server)
        self.take(server)  # somebody's
        self.resize(server, self.make_ram_flavor())
        self.assertIn('InstanceFaultRollback', self.fault(server))
        self.check_kept(server)

    def test_nothing_stays_of_one_that_is_deleted(self) -> None:
        server = self.boot(self.flavor)
        self.checkpoints.names.add(AUTO)
        self.take(server, AUTO)
        self._delete_server(server)
        self.assertEqual([], self.images())
        self.assertEqual([], self.driver.list_instances())


class RefusedTest(PersistenceCase):
    def test_before_anything_is_made(self) -> None:
        self.flags(config_drive_format='vfat', force_config_drive=True)
        for made, words in (
            (self.make_flavor(root='true', persist='true'), 'pcow:persist without pcow:ram'),
            (self.flavor, 'a config drive that its guest can write to'),
        ):
            self.assertIn(words, self.fault(self.boot(made, 'ERROR')))
        self.assertEqual([], self.images())

    def test_api(self) -> None:
        for value in ('perhaps', ''):
            specs = {'pcow:persist': value}
            self.assertRaises(client.OpenStackApiException, self.make_ram_flavor, specs=specs)

    def refused(self, instance: Any, block_device_info: Any = None) -> str:
        return str(
            self.assertRaises(
                persistence.PersistenceRefused,
                persistence.check,
                instance,
                instance.flavor,
                block_device_info,
            )
        )

    def test_devices(self) -> None:
        instance = self.instance(self.boot(self.flavor))
        persistence.check(instance, instance.flavor, None)
        for key, value in (
            ('pci_passthrough:alias', 'a:1'),
            ('resources:VGPU', '1'),
            ('accel:device_profile', 'p'),
            ('hw:tpm_version', '2.0'),
        ):
            other = self.instance({'id': instance.uuid})
            other.flavor.extra_specs[key] = value
            said = self.refused(other)
            self.assertIn(key, said)
            self.assertIn('take a flavor without pcow:persist', said)
        instance.pci_requests = objects.InstancePCIRequests(
            requests=[objects.InstancePCIRequest(count=1, spec=[])]
        )
        self.assertIn('a port that is a device of the host', self.refused(instance))
        self.flags(config_drive_format='vfat')
        instance.pci_requests, instance.config_drive = None, 'True'
        self.assertIn('config_drive_format', self.refused(instance))

    def test_volume(self) -> None:
        """Before the server is made, and when it is attached."""
        server = self.boot(self.flavor)
        instance = self.instance(server)
        other = {'driver_volume_type': 'rbd', 'serial': 'vol-1', 'data': {}}
        info = {'block_device_mapping': [{'connection_info': other}]}
        self.assertIn('vol-1 is no volume in persistent memory', self.refused(instance, info))
        error = self.assertRaises(
            nova_exception.InvalidVolume,
            self.driver.attach_volume,
            context.get_admin_context(),
            other,
            instance,
            '/dev/vdb',
        )
        self.assertIn('attach one of type pcow', str(error))
        with mock.patch('nova.virt.libvirt.driver.LibvirtDriver.attach_volume') as attach:
            mine = {'driver_volume_type': 'pcow', 'data': {}}
            self.driver.attach_volume(context.get_admin_context(), mine, instance, '/dev/vdb')
        attach.assert_called_once()

    def test_port(self) -> None:
        instance = self.instance(self.boot(self.flavor))
        arguments = context.get_admin_context(), instance, instance.image_meta
        error = self.assertRaises(
            nova_exception.InternalError,
            self.driver.attach_interface,
            *arguments,
            {'id': 'p', 'vnic_type': 'direct'},
        )
        self.assertIn('the port p is of type direct', str(error))
        with mock.patch('nova.virt.libvirt.driver.LibvirtDriver.attach_interface') as attach:
            self.driver.attach_interface(*arguments, {'id': 'p', 'vnic_type': 'normal'})
        attach.assert_called_once()


class HostBootTest(PersistenceCase):
    def setUp(self) -> None:
        super().setUp()
        self.server = self.boot(self.flavor)
        self.definitions.end(self.domain(self.server))

    def end_of_action(self, name: str = 'compute_pcow_go_on') -> Any:
        (found,) = (
            one
            for one in self.api.get_instance_actions(self.server['id'])
            if one['action'] == 'go_on'
        )
        events = self.admin_api.api_get(
            f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}'
        ).body['instanceAction']['events']
        (event,) = (one for one in events if one['event'] == name)
        return event

    def test_it_goes_on(self) -> None:
        """By the definition that it had."""
        self.enter(self.server)
        before = self.domain(self.server).definition()
        self.boot_host()
        self.assertEqual([definitions.MOMENT, 'run', 'arrive'], self.definitions.calls)
        self.assertEqual('ACTIVE', self.api.get_server(self.server['id'])['status'])
        self.check_protected(self.server, BEFORE)
        self.assertEqual(
            before.replace('owner="nova-compute"', ''),
            self.domain(self.server)
            .definition()
            .replace(f'owner="nova-compute" over="{BEFORE}"', ''),
        )
        self.assertEqual(
            ('compute_pcow_go_on', 'Success'),
            (self.end_of_action()['event'], self.end_of_action()['result']),
        )

    def test_it_does_so_once(self) -> None:
        """The record may still be there: the loop was not."""
        self.enter(self.server)
        self.boot_host()
        self.definitions.end(self.domain(self.server))
        self.definitions.calls.clear()
        self.boot_host()
        self.assertEqual([], self.definitions.calls)
        self.assertEqual('ACTIVE', self.api.get_server(self.server['id'])['status'])

    def test_what_nova_has_seen_of_the_end(self) -> None:
        """It stood for its last moment, and was off then."""
        for state in (power_state.PAUSED, power_state.SHUTDOWN):
            self.definitions.calls.clear()
            self.definitions.end(self.domain(self.server))
            self.enter(self.server, run=f'{BEFORE}{state}')
            instance = self.instance(self.server)
            instance.power_state = state
            instance.save()
            self.boot_host()
            self.assertEqual([definitions.MOMENT, 'run', 'arrive'], self.definitions.calls)

    def test_it_cannot(self) -> None:
        """It is in error, and a hard reboot boots it, and says what stays."""
        self.enter(self.server)
        self.definitions.fails = exception.QmpFailed(
            command='x', error_class='y', description='another CPU'
        )
        self.boot_host()
        self.assertEqual('ERROR', self.api.get_server(self.server['id'])['status'])
        for said in (self.fault(self.server), json.dumps(self.end_of_action())):
            self.assertIn('another CPU', said)
            self.assertIn('reboot it hard, and it boots', said)
        self.assertFalse(self.domain(self.server).active())
        self.assertIsNotNone(records.read(self.server['id']))
        self._reboot_server(self.server, hard=True, expected_state='ACTIVE')
        said = self.event_words(self.server, 'reboot')
        self.assertIn(f'that stays as checkpoint {definitions.MOMENT}', said)
        self.check_protected(self.server, BEFORE)

    def test_an_image_that_is_not_there(self) -> None:
        self.enter(self.server)
        os.rename(self.path(self.server, 'root'), self.path(self.server, 'elsewhere'))
        self.boot_host()
        self.assertIn('-root is in none of the pools', self.fault(self.server))
        self.assertEqual([], self.definitions.calls)

    def test_nothing_is_known(self) -> None:
        """Whatever did not look: it boots, and says so."""
        self.boot_host()
        self.assertEqual('ACTIVE', self.api.get_server(self.server['id'])['status'])
        self.assertEqual([], self.definitions.calls)
        self.assertIn(
            'nothing is known of its last run', self.end_of_action('compute_pcow_boots')['details']
        )

    def test_it_was_given_up(self) -> None:
        self.enter(self.server, State.FAILED)
        self.boot_host()
        self.assertEqual([], self.definitions.calls)
        self.assertIn(
            'it could not go on: no CPU', self.end_of_action('compute_pcow_boots')['details']
        )
        self.check_protected(self.server, BEFORE)

    def test_one_that_was_stopped(self) -> None:
        self._stop_server(self.server)
        self.enter(self.server)
        self.boot_host()
        self.assertEqual([], self.definitions.calls)
        self.assertEqual('SHUTOFF', self.api.get_server(self.server['id'])['status'])

    def test_stop_says_what_stays(self) -> None:
        """Nova was told not to resume it, for instance."""
        self.enter(self.server)
        self.check_stop()

    def test_stop_while_it_waits(self) -> None:
        """The host did not go down; Nova waits for what it sees."""
        self.enter(self.server, run=self.here())
        self.check_stop()

    def test_stop_while_its_policy_cannot_be_changed(self) -> None:
        self.enter(self.server, run=self.here())
        error = exception.LibvirtFailed(uri='x', reason='no lock')
        with mock.patch.object(policy, 'write', side_effect=error):
            self._stop_server(self.server)
        self.check_protected(self.server)

    def check_stop(self) -> None:
        self._stop_server(self.server)
        self.assertIn('its next start is a boot', self.event_words(self.server, 'stop'))
        self.assertIsNone(self.protection(self.server))

    def test_a_service_that_was_killed_meanwhile(self) -> None:
        """The guest was started, paused, and left."""
        self.enter(self.server)
        self.domain(self.server)._domain.create()
        self.definitions.has_run, self.definitions.paused_on_purpose = False, True
        with (
            mock.patch('nova.virt.libvirt.guest.Guest.get_power_state', return_value=3),
            mock.patch('pcow_driver.vm.checkpoint.current_name', return_value=definitions.MOMENT),
            mock.patch('pcow_driver.vm.checkpoint.revert') as revert,
        ):
            for calls in (['run', 'arrive'], ['run']):  # it is used up, and did not run
                self.definitions.calls.clear()
                self.driver.resume_state_on_host_boot(
                    context.get_admin_context(), self.instance(self.server), [], None, None
                )
                self.assertEqual(calls, self.definitions.calls)
        revert.assert_called_once()


class InfoTest(PersistenceCase):
    """What Nova sees of a server that is about to go on without it."""

    def setUp(self) -> None:
        super().setUp()
        self.server = self.boot(self.flavor)

    def state(self, vm_state: str = vm_states.ACTIVE) -> int:
        instance = self.instance(self.server)
        instance.vm_state = vm_state
        return int(self.driver.get_info(instance).state)

    def test_fixated(self) -> None:
        """As long as the host does not go down."""
        self.enter(self.server, State.FIXATED, self.here())
        self.definitions.end(self.domain(self.server))
        self.assertEqual(power_state.RUNNING, self.state())
        self._run_periodics()
        self.assertEqual('ACTIVE', self.api.get_server(self.server['id'])['status'])
        self.assertEqual(power_state.SHUTDOWN, self.state(vm_states.STOPPED))
        self.enter(self.server, State.FIXATED, BEFORE)
        self.assertEqual(power_state.SHUTDOWN, self.state())

    def test_killed(self) -> None:
        """For a while."""
        self.enter(self.server, State.RUNS, self.here())
        self.definitions.end(self.domain(self.server), killed=True)
        self.assertEqual(power_state.RUNNING, self.state())
        self.driver._off_since[self.server['id']] -= 301
        self.assertEqual(power_state.SHUTDOWN, self.state())
        self.driver.power_on(context.get_admin_context(), self.instance(self.server), [])
        self.assertEqual(power_state.RUNNING, self.state())
        self.assertEqual({}, self.driver._off_since)

    def test_ended(self) -> None:
        self.enter(self.server, State.RUNS, self.here())
        self.definitions.end(self.domain(self.server))
        self.assertEqual(power_state.SHUTDOWN, self.state())

    def test_stops_for_a_checkpoint(self) -> None:
        paused = types.SimpleNamespace(state=power_state.PAUSED, internal_id=1)
        runs = list[bool]()
        for where, name, new in (
            ('nova.virt.libvirt.guest.Guest', 'get_info', lambda _guest, _host: paused),
            ('pcow_driver.virt.domain.Domain', 'running', lambda _found: bool(runs and runs.pop())),
        ):
            self.useFixture(fixtures.MonkeyPatch(f'{where}.{name}', new))
        self.assertEqual(power_state.PAUSED, self.state())
        runs += [True, False, False]
        self.assertEqual(power_state.RUNNING, self.state())
        self.definitions.paused_on_purpose = True
        runs += [True]
        self.assertEqual(power_state.PAUSED, self.state())
        self.enter(self.server, State.FIXATING, self.here())
        self.assertEqual(power_state.RUNNING, self.state())

    def test_events(self) -> None:
        """Nova hears nothing of checkpoints, and of all else."""
        other = self.boot(self.make_ram_flavor())
        paused, resumed = virtevent.EVENT_LIFECYCLE_PAUSED, virtevent.EVENT_LIFECYCLE_RESUMED
        self.state()
        heard = list[int]()
        self.driver._compute_event_callback = lambda one: heard.append(one.transition)
        for server, on_purpose, runs, expected in (
            (self.server, False, True, []),
            (self.server, True, True, [paused, resumed]),
            (self.server, False, False, [paused, resumed]),  # for an error
            (self.server, False, True, []),
            (other, False, True, [paused, resumed]),
        ):
            self.definitions.paused_on_purpose = on_purpose
            heard.clear()
            with mock.patch.object(domain.Domain, 'running', new=lambda _found, runs=runs: runs):
                for transition in (paused, resumed):
                    self.driver.emit_event(virtevent.LifecycleEvent(server['id'], transition))
            self.assertEqual(expected, heard)

    def test_record_that_cannot_be_read(self) -> None:
        """It is what libvirt says."""
        self.enter(self.server, State.FIXATED, self.here())
        self.definitions.end(self.domain(self.server))
        with open(records.path_of(self.server['id']), 'w', encoding='ascii') as file:
            file.write('{')
        self.assertEqual(power_state.SHUTDOWN, self.state())

    def test_others(self) -> None:
        """Nothing is asked of them."""
        other = self.boot(self.make_ram_flavor())
        self.definitions.end(self.domain(other))
        with mock.patch('pcow_driver.fixation.owned.is_held') as held:
            info = self.driver.get_info(self.instance(other))
        self.assertEqual((power_state.SHUTDOWN, False), (info.state, held.called))

    def test_warning(self) -> None:
        self.flags(resume_guests_state_on_host_boot=False)
        for _time in range(2):
            self._reboot_server(self.server, hard=True)
        said = self.stdlog.logger.output
        self.assertEqual(1, said.count('set [DEFAULT] resume_guests_state_on_host_boot'))
