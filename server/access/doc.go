// Package access has the principals of a node, their credentials, and their roles on namespaces. It
// decides nothing about calls: package server declares which role each call needs.
//
//	roles file ── Parse ──► Policy
//	Authorization header ─┐    │
//	certificate's subject ┴────┴──► Identity ──► Principal.Has(role, namespace)
//
// The file is YAML:
//
//	principals:
//	  - name: rollout-a                      # in the audit log and in errors
//	    tokens:                              # SHA-256 of each bearer token
//	      - sha256:4a44dc15364204a80fe80e9039455cc1608281820fe2b24f1e5233ade6af1dd5
//	    subjects: ["CN=engine,O=team-a"]     # subjects of client certificates (RFC 2253)
//	    rates: {read: 2GiB, write: 512MiB}   # bytes per second; without it there is no limit
//	    weight: 3                            # share of the reads that wait; default 1
//	    grants:
//	      - {roles: [read, write], namespaces: [team-a/*, shared]}
//	  - name: sre
//	    tokens: [sha256:9b74c9897bac770ffc029102a200c5de1d3f2b5f1b0d9f6d0f4b1f3a9f0e6c1d]
//	    grants:
//	      - {roles: [operate, admin], namespaces: ["*"]}
//	tenants:
//	  - {namespaces: team-a/*, quota: 2TiB}  # bytes of all namespaces with this prefix on a node
//
// The format differs from that of a token file (package bearer). A principal has several
// credentials, which an operator replaces one at a time, and several grants, and the errors of a
// file with that structure must name a line. The file has the SHA-256 of each token and not the
// token, so that it can be kept with the rest of a configuration. A hash without a salt is enough
// because a token is random: Policy accepts no token with fewer than bearer.MinChars characters.
//
// A namespace of a grant is the exact name, or a prefix followed by "*". The roles are independent:
// write does not include read. The role operate concerns the whole node, so it is granted on "*".
// Package server applies the rates, and package storage the weights and the quotas.
//
// The quota of a tenant is in this file, because the file grants access on the same prefixes, is the one
// document that a tenant cannot change, and is reloaded live. The role admin on a prefix permits to
// change the quota of a namespace (penstock ns quota) and to create further namespaces, so a quota that
// a call sets would not limit a tenant. A tenant is a prefix and not a principal: several principals may
// write the same namespaces, whose blocks are shared. The prefixes of tenants do not overlap, so that
// one quota holds for a namespace; those of grants may overlap, because roles add up.
//
// Comparison: the SHA-256 of a presented token is compared with that of each token of the file, in
// a time that depends neither on the characters of the token nor on the principal.
//
// There is no lock; a Policy is immutable after Parse.
package access
