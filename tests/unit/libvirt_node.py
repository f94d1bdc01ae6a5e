# SPDX-License-Identifier: Apache-2.0
"""A file that libvirt's test driver takes for its host (uri: test:// and the path of the file)."""

_NODE = '''<node><domain type='test'><name>vm</name>
  <metadata><ram xmlns='urn:pcow:domain' path='{1}'/></metadata>
  <maxMemory slots='4'>4194304</maxMemory>
  <memory>1048576</memory>
<vcpu>1</vcpu><os><type>hvm</type></os>
  <cpu><numa><cell id='0' cpus='0' memory='1048576'/></numa></cpu><devices>
<memory model='nvdimm' access='shared'><source><path>{0}</path></source>
<target><size unit='KiB'>67584</size><node>0</node></target></memory></devices></domain></node>'''


def xml(path: str, ram: str = '/no/such-ram.pcow') -> str:
    """A host whose only domain, which is off, has an NVDIMM of the first image, and RAM of the
    other one.
    """
    return _NODE.format(path, ram)
