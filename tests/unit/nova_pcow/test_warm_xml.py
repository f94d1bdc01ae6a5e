# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from nova_pcow.warm_images import warm_xml

_PARENT = """
<domain type='kvm'>
  <name>instance-00000001</name>
  <uuid>0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11</uuid>
  <metadata><x/></metadata>
  <maxMemory slots='9' unit='KiB'>69404672</maxMemory>
  <memory unit='KiB'>262144</memory>
  <vcpu placement='static' cpuset='0-3'>1</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-8.2'>hvm</type>
    <kernel>/a/kernel</kernel><cmdline>quiet</cmdline>
  </os>
  <cpu mode='host-model' check='partial'/>
  <devices>
    <emulator>/usr/bin/qemu</emulator>
    <disk type='file' device='cdrom'>
      <driver name='qemu' type='raw'/><source file='/a/disk.config'/>
      <target dev='sda' bus='sata'/><readonly/>
      <address type='drive' controller='0' bus='0' target='0' unit='0'/>
    </disk>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0'/>
    </controller>
    <controller type='pci' index='2' model='pcie-root-port'>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x1'/>
    </controller>
    <serial type='pty'>
      <log file='/a/console.log' append='off'/><target type='isa-serial' port='0'/>
    </serial>
    <channel type='unix'>
      <source mode='bind' path='/a/agent.sock'/>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
      <address type='virtio-serial' controller='0' bus='0' port='1'/>
    </channel>
    <graphics type='vnc' port='-1' passwd='secret'/>
    <memballoon model='virtio'>
      <stats period='10'/>
      <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/>
    </memballoon>
    <memory model='nvdimm'>
      <source><path>/p/server-a-root.pcow</path></source>
      <target><size unit='KiB'>65536</size><node>0</node></target>
      <alias name='ua-pcow-root'/>
      <address type='dimm' slot='0'/>
    </memory>
  </devices>
</domain>
"""
_BALLOON = "bus='0x02'"
_PORT = _PARENT[
    _PARENT.index("    <controller type='pci' index='2'") : _PARENT.index('    <serial')
]
_NIC = "<interface type='bridge'><mac address='fa:16:3e:00:00:01'/></interface>"


def child(*changes: tuple[str, str]) -> str:
    """As Nova makes it for another server: its balloon is where there was an interface."""
    xml = _PARENT.replace(_PORT, '').replace(_BALLOON, "bus='0x01'").replace('/a/', '/b/')
    for old, new in (('server-a', 'server-b'), ('00000001', '00000002'), *changes):
        if old not in xml:
            raise AssertionError(f'{old} is not in it')
        xml = xml.replace(old, new)
    return xml


class AdoptTest(base.BaseTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.machine = warm_xml.describe(_PARENT)

    def adopt(self, *changes: tuple[str, str]) -> str:
        return warm_xml.adopt(child(*changes), self.machine)

    def test_what_is_kept(self) -> None:
        for word in ('secret', 'instance-00000001', '<x'):
            self.assertNotIn(word, self.machine)

    def test_addresses(self) -> None:
        made = self.adopt()
        self.assertIn('bus="0x02"', made)
        self.assertNotIn('bus="0x01"', made)
        self.assertEqual(3, made.count('<controller'))
        # the host's part is its own
        for word in ('/b/disk.config', '/b/console.log', '/b/kernel', 'server-b-root', 'secret'):
            self.assertIn(word, made)
        for word in ('/a/', 'server-a'):
            self.assertNotIn(word, made)

    def test_what_no_guest_sees(self) -> None:
        self.adopt(("cpuset='0-3'", "cpuset='1'"))
        self.adopt(("<stats period='10'/>", ''))
        self.adopt(("type='pty'", "type='file'"))
        self.adopt(("passwd='secret'", ''))
        self.adopt(('quiet', 'verbose'))

    def test_other_machines(self) -> None:
        for change in (
            ('pc-q35-8.2', 'pc-q35-9.0'),
            ('>1</vcpu>', '>2</vcpu>'),
            ('262144', '524288'),
            ('69404672', '69404673'),
            ('host-model', 'host-passthrough'),
            ("bus='sata'", "bus='ide'"),
            ("device='cdrom'", "device='disk'"),
            ('ua-pcow-root', 'ua-pcow-data0'),
            ('65536', '131072'),
            ("<memballoon model='virtio'>", "<memballoon model='virtio-transitional'>"),
            ('    <graphics', "    <rng model='virtio'/><graphics"),
            ("<serial type='pty'>", "<serial type='pty'><x/>"),
        ):
            with self.subTest(change=change):
                self.assertRaises(warm_xml.MachineDiffers, self.adopt, change)

    def test_a_device_less(self) -> None:
        start, end = '    <memballoon', '    <memory model'
        text = child()
        less = text[: text.index(start)] + text[text.index(end) :]
        error = self.assertRaises(warm_xml.MachineDiffers, warm_xml.adopt, less, self.machine)
        self.assertIn('the other one has the device <memballoon', str(error))

    def test_interfaces_come_later(self) -> None:
        bare, interfaces = warm_xml.split(child(('    <graphics', f'{_NIC}{_NIC}<graphics')))
        self.assertNotIn('<interface', bare)
        self.assertEqual(2, len(interfaces))
        for one in interfaces:
            self.assertIn('fa:16:3e:00:00:01', one)
        warm_xml.adopt(bare, self.machine)


class UnchangedTest(base.BaseTestCase):
    def test_same(self) -> None:
        running = _PARENT.replace("slot='0'/>", "slot='0' base='0x100000000'/>").replace(
            "model='virtio'>", "model='virtio'><alias name='balloon0'/>"
        )
        warm_xml.check_unchanged(running, _PARENT)

    def test_what_a_guest_does(self) -> None:
        """Its agent listens, and it ejects a medium; libvirt tells either of what runs."""
        for state in ('connected', 'disconnected'):
            running = _PARENT.replace("agent.0'/>", f"agent.0' state='{state}'/>")
            warm_xml.check_unchanged(running, _PARENT)
        warm_xml.check_unchanged(
            _PARENT.replace("bus='sata'/>", "bus='sata' tray='open'/>"), _PARENT
        )

    def test_others(self) -> None:
        for old, new in (
            (_BALLOON, "bus='0x01'"),
            ('    <graphics', "    <rng model='virtio'/><graphics"),
        ):
            error = self.assertRaises(
                warm_xml.MachineDiffers,
                warm_xml.check_unchanged,
                _PARENT.replace(old, new),
                _PARENT,
            )
            self.assertIn('reboot it hard first', str(error))
