# SPDX-License-Identifier: Apache-2.0
"""A revert of a whole VM that ended halfway: nobody changes an image whose next VM would drop that,
without a word.
"""

import subprocess

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.images import image
from tests.functional import images
from tests.functional import vm_snapshot_case
from tests.functional import vm_state

MARK = '.loading-1700000000.000000001-1'
HALFWAY = (
    rf"a revert of the whole VM ended halfway, \S+a\.pcow has its snapshot as '{MARK}': start the "
    rf"VM to have it finished"
)


class HalfwayTest(images.ImageTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.image = self.create('a.pcow')
        for number, name in enumerate((MARK, 'other')):
            self.io(self.image, f'write -P {number + 1} 0 64k')
            self.img('snapshot', '-c', 'one' if name == MARK else name, self.image)
        self.img('snapshot', '--rename', 'one', MARK, self.image)
        self.before = images.digest(self.image)

    def assert_unchanged(self) -> None:
        self.assertEqual(self.before, images.digest(self.image))

    def test_snapshots(self) -> None:
        for words in (('-a', 'other'), ('-c', 'new')):
            self.img_fails('snapshot', *words, self.image, message=HALFWAY)
            self.img_fails(
                'snapshot',
                *words,
                self.image,
                message='to take the image as it is, rename that snapshot',
            )
        self.assert_unchanged()

    def test_what_else_would_be_lost(self) -> None:
        raw = self.path('raw')
        raw.write_bytes(bytes(2 * images.MIB))
        child = self.create('child.pcow', None, '-b', self.image)
        self.io(child, 'write -P 7 0 64k')
        for words in (
            ('resize', self.image, '32M'),
            ('commit', child),
            ('convert', '-n', '-f', 'raw', '-O', 'pcow', raw, self.image),
        ):
            self.img_fails(*words, message=HALFWAY)
        self.io(child, 'read -P 7 0 64k')
        self.assert_unchanged()
        for command in (
            'write -P 9 0 64k',
            'write -z 0 64k',
            'snapshot revert other',
            'snapshot create new',
            'resize 32M',
        ):
            self.assertRegex(
                self.run_program('pcow-io', '-c', command, self.image, code=1).stderr, HALFWAY
            )
        self.io(self.image, 'read -P 2 0 64k')
        self.assertEqual(
            [MARK, 'other'], [one['name'] for one in self.img_json('snapshot', '-l', self.image)]
        )

    def test_served(self) -> None:
        plugin = images.program('nbdkit-pcow-plugin.so')
        for words, code in (((), 1), (('readonly=true',), 0)):
            done = subprocess.run(
                ['nbdkit', '-U', '-', plugin, f'file={self.image}', *words, '--run', 'true'],
                capture_output=True,
                text=True,
                check=False,
                timeout=images.TIMEOUT,
            )
            self.assertEqual(code, done.returncode, done.stderr)
            if code:
                self.assertRegex(done.stderr, HALFWAY)

    def test_what_finishes_it(self) -> None:
        """What etc/libvirt/bin/qemu-img does, and the ways out."""
        self.img('snapshot', '-d', 'other', self.image)
        self.img('snapshot', '-a', MARK, self.image)
        self.img('snapshot', '--rename', MARK, 'one', self.image)
        self.io(self.image, 'read -P 1 0 64k', 'write -P 3 0 64k')
        self.img('snapshot', '-c', 'two', self.image)
        self.img('snapshot', '--rename', 'one', MARK, self.image)
        self.img('snapshot', '-d', MARK, self.image)
        self.img('snapshot', '-a', 'two', self.image)
        self.io(self.image, 'read -P 3 0 64k')

    def test_domain_that_is_off(self) -> None:
        """pcowctl, with --domain or without, has pcow-img do it."""
        conf.CONF([], default_config_files=[])
        conf.CONF.set_override('pcow_img', images.program('pcow-img'), 'pcow')
        self.addCleanup(conf.CONF.clear_override, 'pcow_img', 'pcow')
        for function in (image.snapshot_revert, image.snapshot_create):
            error = self.assertRaises(exception.ToolFailed, function, str(self.image), 'other')
            self.assertRegex(str(error), HALFWAY)


class VmTest(vm_snapshot_case.VmSnapshotTestCase):
    def test_reverted_by_hand(self) -> None:
        """It is refused, so that the start of the VM, which goes back to the other snapshot, drops
        nothing.
        """
        self.save_and_go_on()
        vm_state.run('pcow-img', 'snapshot', '-c', 'other', self.image)
        with self.start() as vm:
            (found,) = [one for one in vm.snapshots() if one['name'] == 's']
            vm.quit()
        mark = f'.loading-{found["date-sec"]}.{found["date-nsec"]:09}-1'
        vm_state.run('pcow-img', 'snapshot', '--rename', 's', mark, self.image)
        done = subprocess.run(
            [images.program('pcow-img'), 'snapshot', '-a', 'other', str(self.image)],
            capture_output=True,
            text=True,
            check=False,
            timeout=images.TIMEOUT,
        )
        self.assertEqual(1, done.returncode, done)
        self.assertIn('ended halfway', done.stderr)
        vm_state.run('pcow-img', 'snapshot', '--rename', mark, 's', self.image)
        vm_state.run('pcow-img', 'snapshot', '-a', 'other', self.image)
        with self.start() as vm:
            self.assertEqual(b'now.', vm.read(vm.address('nv0'), 4))
            vm.quit()
