"""How processes of a cluster authenticate: certificates or a shared secret."""

from pdserve.services.common.auth.access import (
    Access,
    TlsAccess,
    TlsFiles,
    make_access,
    make_tls,
    read_pem,
)
from pdserve.services.common.auth.certificates import (
    Identity,
    Role,
    ends_of,
    in_settings,
    issue,
    make_authority,
)
