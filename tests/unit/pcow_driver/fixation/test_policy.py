# SPDX-License-Identifier: Apache-2.0
"""Through libvirt's test driver."""

import dataclasses

from pcow_driver.common import exception
from pcow_driver.fixation import policy
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from tests.unit import libvirt_node
from tests.unit.pcow_driver import base


class PolicyTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        node = self.directory / 'node.xml'
        node.write_text(libvirt_node.xml('/no/such.pcow'), encoding='utf-8')
        self.configure(libvirt_uri=f'test://{node}')

    def test_session(self) -> None:
        with libvirt_host.connect() as connection:
            found = domain.Domain(connection, 'vm')
            self.assertIsNone(policy.get(found))
            policy.change(found)
            self.assertEqual(policy.Policy(), policy.get(found))
            policy.change(found, interval='30s', on_shutdown=policy.STOP)
            policy.change(found, priority=-7, guest_hook=True)
            self.assertEqual(policy.Policy(30, policy.STOP, -7, True), policy.get(found))
            policy.change(found, guest_hook=False)
            self.assertEqual(policy.Policy(30, policy.STOP, -7), policy.get(found))
            self.assertEqual('/no/such-ram.pcow', found.ram())  # the other metadata are there
            policy.remove(found)
            self.assertIsNone(policy.get(found))

    def test_of_an_owner(self) -> None:
        """He writes it as he starts the domain; an administrator may change what is not his."""
        wanted = policy.Policy(owner='nova-compute', over='boot/7-1')
        with libvirt_host.connect() as connection:
            found = domain.Domain(connection, 'vm')
            policy.write(found, wanted)
            self.assertEqual(wanted, policy.get(found))
            policy.change(found, interval='30s')
            self.assertEqual(dataclasses.replace(wanted, interval=30), policy.get(found))
            policy.write(found, None)
            self.assertIsNone(policy.get(found))
            for before in (policy.Policy(), wanted):  # it was defined with
                xml = policy.in_definition(found.definition(), before)
                domain.Domain.define(connection, policy.in_definition(xml, wanted))
            self.assertEqual(wanted, policy.get(found))
            self.assertEqual('/no/such-ram.pcow', found.ram())

    def test_server_of_nova(self) -> None:
        with libvirt_host.connect() as connection:
            found = domain.Domain(connection, 'vm')
            found.set_metadata(libvirt_xml.NOVA_NAMESPACE, 'nova', '<instance/>')
            error = self.assertRaises(exception.DomainInvalid, policy.change, found)
            self.assertIn('pcow:persist=true', str(error))
            policy.write(found, policy.Policy(owner='nova-compute'))
            policy.change(found, priority=2)

    def test_what_is_none(self) -> None:
        with libvirt_host.connect() as connection:
            found = domain.Domain(connection, 'vm')
            for wanted in (
                {'interval': '0s'},
                {'interval': '1e9'},
                {'interval': '90000s'},
                {'on_shutdown': 'burn'},
                {'priority': 1001},
            ):
                self.assertRaises(exception.UsageInvalid, policy.change, found, **wanted)
            self.assertIsNone(policy.get(found))
            for text in (
                '<protect interval="x"/>',
                '<protect priority="high"/>',
                '<protect guest-hook="maybe"/>',
            ):
                found.set_metadata('urn:pcow:protection', 'pcow', text)
                self.assertRaises(exception.UsageInvalid, policy.get, found)

    def test_libvirt_starts_it_itself(self) -> None:
        with libvirt_host.connect() as connection:
            found = domain.Domain(connection, 'vm')
            connection.lookupByName('vm').setAutostart(True)
            error = self.assertRaises(exception.DomainInvalid, policy.change, found)
            self.assertIn('virsh autostart --disable vm', str(error))
