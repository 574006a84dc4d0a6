"""How processes of a cluster authenticate: certificates or a shared secret."""

from pdserve.services.common.auth.access import Access, make_access, make_tls
from pdserve.services.common.auth.certificates import (
    Identity,
    ends_of,
    in_settings,
    issue,
    make_authority,
)
from pdserve.services.common.auth.roles import Role
from pdserve.services.common.auth.tls import TlsAccess, TlsFiles, read_pem
