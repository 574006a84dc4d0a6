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
    certificate_settings,
    expiries_of,
    issue,
    make_authority,
)
