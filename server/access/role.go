package access

import "strings"

// Role is a set of roles.
type Role uint8

// The roles.
const (
	// Read: match, read and lease blocks.
	Read Role = 1 << iota
	// Write: store blocks and remove them.
	Write
	// Admin: create, change, inspect and delete namespaces, and pin blocks without an expiry.
	Admin
	// Operate: the node itself: status, volumes, configuration, metrics, profiles.
	Operate

	// Any is the set of all roles.
	Any = Read | Write | Admin | Operate
)

var roleNames = []struct {
	role Role
	name string
}{{Read, "read"}, {Write, "write"}, {Admin, "admin"}, {Operate, "operate"}}

// Roles returns each role, in the order of the constants.
func Roles() []Role { return []Role{Read, Write, Admin, Operate} }

// String returns the names of the roles, joined by "or".
func (r Role) String() string {
	var names []string
	for _, n := range roleNames {
		if r&n.role != 0 {
			names = append(names, n.name)
		}
	}
	return strings.Join(names, " or ")
}

// roleNamed returns the role with a name.
func roleNamed(name string) (Role, bool) {
	for _, n := range roleNames {
		if n.name == name {
			return n.role, true
		}
	}
	return 0, false
}
