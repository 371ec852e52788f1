package config

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// mountName matches the name of a mount.
var mountName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// mount is one element of Cluster.Mounts.
type mount struct{ name, dir string }

// parseMount parses NAME=DIRECTORY.
func parseMount(text string) (m mount, ok bool) {
	m.name, m.dir, ok = strings.Cut(text, "=")
	return m, ok && mountName.MatchString(m.name) && filepath.IsAbs(m.dir)
}

func (c Cluster) checkMounts(bad complaint) {
	var names []string
	for _, text := range c.Mounts {
		m, ok := parseMount(text)
		if !ok || slices.Contains(names, m.name) {
			bad("cluster.mounts", "%q is not NAME=DIRECTORY with an absolute directory, or its name is given twice", text)
		}
		names = append(names, m.name)
	}
}

// PlaceOf returns the place of an absolute directory, as the cluster records it: MOUNT:PATH, with the
// path below the innermost of Mounts that has the directory, otherwise the directory itself.
func (c Cluster) PlaceOf(dir string) string {
	place, deepest := filepath.Clean(dir), 0
	for _, text := range c.Mounts {
		m, ok := parseMount(text)
		if !ok {
			continue // Validate reports it
		}
		if rel, err := filepath.Rel(m.dir, dir); err == nil && filepath.IsLocal(rel) && len(m.dir) > deepest {
			place, deepest = m.name+":"+rel, len(m.dir)
		}
	}
	return place
}

// DirOf returns the directory of a place on this host.
func (c Cluster) DirOf(place string) (string, error) {
	if filepath.IsAbs(place) {
		return place, nil
	}
	name, rel, ok := strings.Cut(place, ":")
	if !ok || !filepath.IsLocal(rel) {
		return "", fmt.Errorf("%q is neither an absolute directory nor MOUNT:PATH", place)
	}
	for _, text := range c.Mounts {
		if m, ok := parseMount(text); ok && m.name == name {
			return filepath.Join(m.dir, rel), nil
		}
	}
	return "", fmt.Errorf("cluster.mounts of this node has no mount point of %s: add %s=DIRECTORY", name, name)
}
