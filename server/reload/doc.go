// Package reload changes the settings, bearer tokens, roles and certificates of a process while it runs.
// It reads no setting itself, and it does not restart or re-open a part of the process: a setting
// for which that would be necessary needs a restart of the whole process.
//
//	SIGHUP, penstock config reload             files of tokens and certificates change
//	             │                                             │
//	             ▼                                             ▼
//	read file, environment and flags              read the files until two reads agree
//	validate ── bad value ──► error                            │
//	compare  ── restart ────► error                            │
//	read tokens and certificates ── damaged ──► error, logged once ◄──┤
//	             │                                             │
//	Candidate.Prepare ── failed ──► error                      │
//	             ▼ nothing below can fail                      ▼
//	exchange tokens and certificates ◄─────────────────────────┘
//	apply the settings, then report changed credentials (Options.Changed)
//
// Settings of a storage node that a reload applies:
//
//	auth.token_file auth.roles_file
//	auth.tls_cert auth.tls_key auth.client_ca                    the paths, and the content of the files
//	limits.reads limits.writes limits.leases limits.lease_ttl limits.reservation_ttl
//	limits.loan_bytes limits.queue_wait limits.read_wait         calls that begin afterwards have the new limits
//	encryption.keys_file encryption.keys_command
//	encryption.keys_timeout                                      slots that are reserved afterwards (Candidate.Prepare)
//	encryption.rewrite_rate                                      the next block that is rewritten
//	free_floor scrub_rate                                        the next write, the next step of the scrubber
//	log.level drain_timeout insecure
//
// A planner and a gateway apply auth (a gateway has no auth.roles_file), log.level, drain_timeout and
// insecure. The quota of a namespace is no setting: penstock ns quota changes it at once.
// The quotas of tenants are a part of the roles. Every other
// setting needs a restart. Package config has the reason for each one in the tag restart of its
// field, and the error of a refused reload contains the reason. The reasons are of five kinds:
//
//   - a part was opened or sized with the setting: listeners, volumes, arena, index, queues
//   - clients have the value from the node and rely on it: limits of calls, durability, name, address
//   - the setting has an effect only at a start: add_volumes, degraded
//   - volumes are encrypted from a start on: encryption from or to empty
//   - a listener that is open cannot change between plain text and TLS: auth.tls_cert from or to empty
//
// Atomic: the whole new configuration is read and validated before anything changes. If a value is
// bad, a file cannot be read, or a setting that needs a restart differs, nothing is applied. The
// error names each such setting with its old value, its new value and the reason. Then
// Candidate.Prepare makes the one change that can fail, of the keys of encrypted volumes. Then the parts
// change one after another, each by one assignment that cannot fail. A call that runs meanwhile
// uses the old or the new value of each setting.
//
// A TLS connection keeps the certificates of its handshake. Options.Changed closes the gRPC connections of clients whose
// certificates a new auth.client_ca does not verify, and no others. A gRPC call is
// accepted if its token is in the file when the call begins. To replace a token, list the new and the
// old one in the file (one a line), reload, give the new one to the clients, then remove the old one
// and reload. Tokens of auth.roles_file are replaced in the same way. A session of the data plane
// belongs to the credential of its client in auth.roles_file or auth.token_file, and to the CA of its certificate in
// auth.client_ca. Options.Changed ends the session when either is removed. A TLS
// session that is resumed after a reload of auth.client_ca is verified with the new CA (crypto/tls).
//
// Watch: the directories of the files, and of the symbolic links to them, are watched (inotify), so
// that the exchange of a link by Kubernetes or certbot is noticed. While a file is being written,
// or a new certificate has no new key yet, the old pair stays in use. A file system without inotify
// (NFS) reports no changes of other machines: send SIGHUP there.
//
// The roles document in etcd (auth.roles_etcd) reaches the process by TakeRoles. Until then, Roles returns a policy that
// refuses every call. A document that is invalid, a key that was deleted and an etcd that does not answer leave the
// document in use; RolesState and a metric have the problem. If etcd does not answer for longer than cluster.lease_ttl, the
// document is outdated, and only calls that show the state of the process are decided by it.
//
// Secrets: a Change and a log line have paths, the number of tokens, and the fingerprints of
// certificates and of roles files. They never have a token or a key.
//
// Options.Check refuses a roles file that the process cannot use, and so leaves the one in use. The document in etcd is used
// nevertheless, because it may revoke roles.
//
// Locks: Reloads take turns (Reloader.turn), and may take as long as encryption.keys_command runs. Reloader.mu is
// held while files of tokens and certificates are read and exchanged, and for the exchange of the settings. So
// changed files, the roles document and Diff do not wait for a reload. Nothing that serves calls takes
// either.
package reload
