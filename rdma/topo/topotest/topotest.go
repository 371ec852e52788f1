package topotest

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
)

// Write writes the tree that text describes into the directory dir.
func Write(dir, text string) error {
	w := &writer{dir: dir}
	line := 0
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		line++
		words, err := split(s.Text())
		if err == nil && len(words) > 0 {
			err = w.device(words[0], words[1:])
		}
		if err != nil {
			return fmt.Errorf("topotest: line %d: %w", line, err)
		}
	}
	return nil
}

// split splits a line into words. Double quotes group words.
func split(line string) ([]string, error) {
	var words []string
	var b strings.Builder
	quoted, any := false, false
	for _, c := range line {
		switch {
		case c == '"':
			quoted, any = !quoted, true
		case c == '#' && !quoted && b.Len() == 0:
			return words, nil
		case (c == ' ' || c == '\t') && !quoted:
			if any {
				words = append(words, b.String())
				b.Reset()
				any = false
			}
		default:
			b.WriteRune(c)
			any = true
		}
	}
	if quoted {
		return nil, errors.New("a quote is not closed")
	}
	if any {
		words = append(words, b.String())
	}
	return words, nil
}

type writer struct {
	dir string
}

// device writes the files and links of the device that one line of the description declares.
func (w *writer) device(kind string, words []string) error {
	switch kind {
	case "file":
		if len(words) != 2 {
			return errors.New("file takes a path and its content")
		}
		return w.files(map[string]string{words[0]: words[1]})
	case "symlink":
		if len(words) != 2 {
			return errors.New("symlink takes a path and its target")
		}
		path := filepath.Join(w.dir, words[0])
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		return os.Symlink(words[1], path)
	case "directory":
		return os.MkdirAll(filepath.Join(w.dir, words[0]), 0o755)
	case "gone":
		return os.RemoveAll(filepath.Join(w.dir, words[0]))
	case "module":
		return os.MkdirAll(filepath.Join(w.dir, "module", words[0]), 0o755)
	case "link":
		return w.links(map[string]string{
			"class/net/" + words[0] + "/upper_" + words[2]: "class/net/" + words[2],
			"class/net/" + words[0] + "/master":            "class/net/" + words[2],
		})
	}
	name := ""
	if len(words) > 0 && !strings.Contains(words[0], "=") {
		name, words = words[0], words[1:]
	}
	set := make(map[string]string)
	for _, word := range words {
		k, v, ok := strings.Cut(word, "=")
		if !ok {
			return fmt.Errorf("%q is no setting", word)
		}
		set[k] = v
	}
	d := device{w: w, name: name, set: set}
	switch kind {
	case "gpu":
		return d.gpu()
	case "rdma":
		return d.rdma()
	case "net":
		return d.net()
	case "bond":
		return d.bond()
	}
	return fmt.Errorf("%q is no kind of line", kind)
}

// device is one device of the description: its name and its settings.
type device struct {
	w    *writer
	name string
	set  map[string]string
}

func (d device) get(key, otherwise string) string {
	if v, ok := d.set[key]; ok {
		return v
	}
	return otherwise
}

// pciDir returns the device's directory: for at=15/15:01.0/18:00.0 this is
// devices/pci0000:15/0000:15:01.0/0000:18:00.0.
func (d device) pciDir() string {
	at := d.set["at"]
	if at == "" {
		return ""
	}
	parts := strings.Split(at, "/")
	dir := "devices/pci0000:" + parts[0]
	for _, p := range parts[1:] {
		dir += "/0000:" + p
	}
	return dir
}

// pci writes the files of the PCI device from the settings at, numa (default -1), model as
// vendor:device, class, driver, link and linkmax as GT/s and lanes ("32/16"), vfs, vf-of.
func (d device) pci(model, class, driver string) error {
	dir := d.pciDir()
	if dir == "" {
		return nil
	}
	vendor, id, _ := strings.Cut(d.get("model", model), ":")
	max := d.get("linkmax", "32/16")
	speed, width, _ := strings.Cut(d.get("link", max), "/")
	speedMax, widthMax, _ := strings.Cut(max, "/")
	files := map[string]string{
		dir + "/vendor":             "0x" + vendor,
		dir + "/device":             "0x" + id,
		dir + "/class":              d.get("class", class),
		dir + "/numa_node":          d.get("numa", "-1"),
		dir + "/current_link_speed": speed + ".0 GT/s PCIe",
		dir + "/current_link_width": width,
		dir + "/max_link_speed":     speedMax + ".0 GT/s PCIe",
		dir + "/max_link_width":     widthMax,
	}
	if vfs := d.get("vfs", ""); vfs != "" {
		files[dir+"/sriov_numvfs"] = vfs
	}
	links := map[string]string{"bus/pci/devices/" + filepath.Base(dir): dir}
	if driver = d.get("driver", driver); driver != "" {
		links[dir+"/driver"] = "bus/pci/drivers/" + driver
	}
	if pf := d.get("vf-of", ""); pf != "" {
		links[dir+"/physfn"] = filepath.Dir(dir) + "/0000:" + pf
	}
	return errors.Join(d.w.files(files), d.w.links(links))
}

func (d device) gpu() error { return d.pci("10de:2330", "0x030200", "nvidia") }

// rdma writes an RDMA device with one port. The settings and their defaults: layer (InfiniBand),
// node (1: CA), state (4: ACTIVE), phys (5: LinkUp), rate (400 Gb/sec (4X NDR)), gid= and gid2= as
// index,address[,type], netdev with the settings of net. Without the setting at, the device is a
// software device whose parent is netdev.
func (d device) rdma() error {
	if err := d.pci("15b3:1021", "0x020700", "mlx5_core"); err != nil {
		return err
	}
	base := "devices/virtual"
	if dir := d.pciDir(); dir != "" {
		base = dir
	}
	dev := base + "/infiniband/" + d.name
	port := dev + "/ports/" + d.get("port", "1")
	netdev := d.get("netdev", "")
	files := map[string]string{
		dev + "/node_type":   d.get("node", "1: CA"),
		port + "/link_layer": d.get("layer", "InfiniBand"),
		port + "/state":      d.get("state", "4: ACTIVE"),
		port + "/phys_state": d.get("phys", "5: LinkUp"),
		port + "/rate":       d.get("rate", "400 Gb/sec (4X NDR)"),
		port + "/gids/99":    "0000:0000:0000:0000:0000:0000:0000:0000",
	}
	for _, key := range []string{"gid", "gid2", "gid3"} {
		if v := d.get(key, ""); v != "" {
			parts := strings.Split(v, ",")
			files[port+"/gids/"+parts[0]] = parts[1]
			files[port+"/gid_attrs/types/"+parts[0]] = "IB/RoCE v1"
			if len(parts) > 2 {
				files[port+"/gid_attrs/types/"+parts[0]] = parts[2]
			}
			if netdev != "" && d.get("layer", "") == "Ethernet" {
				files[port+"/gid_attrs/ndevs/"+parts[0]] = netdev
			}
		}
	}
	if base == "devices/virtual" {
		files[dev+"/parent"] = netdev
		netdev = ""
	}
	err := errors.Join(d.w.files(files), d.w.links(map[string]string{"class/infiniband/" + d.name: dev}))
	if netdev != "" && !exists(filepath.Join(d.w.dir, "class/net", netdev)) {
		err = errors.Join(err, device{w: d.w, name: netdev, set: d.set}.netAt(base))
	}
	return err
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// net creates the sysfs files of a network interface. The settings and their defaults: speed in Mb/s
// (25000), mtu, oper (up), flags (0x1003), carrier (1), type (1). If the setting "at" is absent, the
// interface is virtual.
func (d device) net() error {
	if err := d.pci("8086:1592", "0x020000", "ice"); err != nil {
		return err
	}
	base := d.pciDir()
	if base == "" {
		base = "devices/virtual"
	}
	return d.netAt(base)
}

func (d device) netAt(base string) error {
	dir := base + "/net/" + d.name
	files := map[string]string{
		dir + "/mtu":       d.get("mtu", "9000"),
		dir + "/operstate": d.get("oper", "up"),
		dir + "/flags":     d.get("flags", "0x1003"),
		dir + "/carrier":   d.get("carrier", "1"),
		dir + "/type":      d.get("type", "1"),
		dir + "/dev_port":  "0",
	}
	if speed := d.get("speed", "25000"); speed != "" {
		files[dir+"/speed"] = speed
	}
	return errors.Join(d.w.files(files), d.w.links(map[string]string{"class/net/" + d.name: dir}))
}

// bond writes a bond interface from the settings members, mode and hash.
func (d device) bond() error {
	if err := d.netAt("devices/virtual"); err != nil {
		return err
	}
	dir := "devices/virtual/net/" + d.name + "/bonding/"
	members := strings.Split(d.get("members", ""), ",")
	err := d.w.files(map[string]string{
		dir + "slaves":           strings.Join(members, " "),
		dir + "mode":             d.get("mode", "802.3ad") + " 4",
		dir + "xmit_hash_policy": d.get("hash", "layer2") + " 0",
	})
	for _, m := range members {
		err = errors.Join(err, d.w.device("link", []string{m, "lower-of", d.name}))
	}
	return err
}

func (w *writer) files(files map[string]string) error {
	for name, content := range files {
		path := filepath.Join(w.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// links makes links from one path below the root to another. The links are relative, as the
// kernel's links are.
func (w *writer) links(links map[string]string) error {
	for name, target := range maps.All(links) {
		path := filepath.Join(w.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		// A link of the kernel is relative to the real location of the link.
		real, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(real, filepath.Join(w.dir, target))
		if err != nil {
			return err
		}
		if err := os.Symlink(rel, path); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}
