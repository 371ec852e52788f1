package kv

// TenantQuota limits the namespaces whose names begin with a prefix. Grants of access are given on
// such prefixes, so one tenant of a node has all of these namespaces.
type TenantQuota struct {
	// Prefix is not empty. Of two quotas of one node, neither prefix begins with the other.
	Prefix string
	// Bytes is the maximum size of the slots of all of these namespaces together on one node, in
	// bytes. It is positive.
	Bytes int64
}
