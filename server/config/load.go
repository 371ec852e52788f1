package config

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/penstock-kv/penstock/internal/yamlfile"
)

// ErrConfig is wrapped by every error about a configuration.
var ErrConfig = errors.New("bad configuration")

// Load reads a storage node's configuration: defaults, then the YAML file at path (none if empty),
// then the environment (in the form of os.Environ). It does not validate the configuration, because
// flags are applied after Load.
func Load(path string, environ []string) (Config, error) {
	c := Default()
	if err := LoadInto(&c, path, environ); err != nil {
		return Config{}, err
	}
	return c, nil
}

// LoadInto is Load for any configuration: c points to a struct of this package that has its
// defaults.
func LoadInto(c any, path string, environ []string) error {
	if path != "" {
		if err := readFile(c, path); err != nil {
			return err
		}
	}
	return readEnv(c, environ)
}

func readFile(c any, path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	f, err := yamlfile.Parse(path, raw)
	if err == nil {
		err = f.Decode(c)
	}
	if err != nil {
		return fmt.Errorf("config: %w: %w", err, ErrConfig)
	}
	return nil
}

// complaint reports an error in a key's value.
type complaint func(key, format string, args ...any)

// complaintsTo returns the complaint that appends to errs.
func complaintsTo(errs *[]error) complaint {
	return func(key, format string, args ...any) {
		*errs = append(*errs, fmt.Errorf("config: %s: %s: %w", key, fmt.Sprintf(format, args...), ErrConfig))
	}
}

// oneOf reports an error unless value is one of the allowed ones.
func (bad complaint) oneOf(key, value string, allowed ...string) {
	if !slices.Contains(allowed, value) {
		bad(key, "%q is not one of %v", value, allowed)
	}
}

// texts reports the settings of the struct to which c points that have a control character or are not UTF-8. Status, the
// metrics and the console carry names and paths, and none of them can carry such a text. The arguments of a command may be
// scripts of several lines.
func (bad complaint) texts(c any) {
	for _, k := range keysOf(c) {
		if k.Path == "encryption.keys_command" {
			continue
		}
		var all []string
		switch v := k.value.Interface().(type) {
		case string:
			all = []string{v}
		case []string:
			all = v
		}
		for _, s := range all {
			if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
				bad(k.Path, "%q has a control character, or is not UTF-8: give another name", s)
			}
		}
	}
}

// checkAddresses reports addresses that are not host:port, and an address of two settings; http may be empty.
func checkAddresses(bad complaint, addrs map[string]string) {
	settings := make(map[string]string) // by address
	for _, key := range slices.Sorted(maps.Keys(addrs)) {
		addr := addrs[key]
		if addr == "" && key == "http" {
			continue
		}
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			bad(key, "%q is not host:port", addr)
		} else if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			bad(key, "%q: port %q is not a number from 0 to 65535", addr, port)
		} else if other := settings[addr]; other != "" && port != "0" {
			bad(key, "%q is the address of %s too: give one of them another port", addr, other)
		}
		settings[addr] = key
	}
}

func (l Log) check(bad complaint) {
	bad.oneOf("log.format", l.Format, "text", "json")
	if err := new(slog.Level).UnmarshalText([]byte(l.Level)); err != nil {
		bad("log.level", "%q is not one of [debug info warn error]", l.Level)
	}
}

func (t Trace) check(bad complaint) {
	if t.Endpoint != "" {
		checkAddresses(bad, map[string]string{"trace.endpoint": t.Endpoint})
	}
}

func (a Auth) check(bad complaint) {
	if (a.TLSCert == "") != (a.TLSKey == "") {
		bad("auth.tls_cert, auth.tls_key", "give both or neither")
	}
	if a.RolesFile != "" && a.TokenFile != "" {
		bad("auth.roles_file", "is set together with auth.token_file, whose tokens may do everything; list the SHA-256 of these tokens in the roles file, and leave auth.token_file empty")
	}
	if a.ClientCA != "" && a.TLSCert == "" {
		bad("auth.client_ca", "needs auth.tls_cert and auth.tls_key")
	}
}

// Roles reports whether calls are decided by roles, from a file or from etcd.
func (a Auth) Roles() bool { return a.RolesFile != "" || a.RolesEtcd != "" }

// checkRolesEtcd reports a key of the roles document that cannot be used. c has the connection to etcd, and the
// prefix of the keys that the document must not replace.
func (a Auth) checkRolesEtcd(bad complaint, c Cluster) {
	if a.RolesEtcd == "" {
		return
	}
	if a.RolesFile != "" || a.TokenFile != "" {
		bad("auth.roles_etcd", "is set together with auth.roles_file or auth.token_file; leave those empty, since the document in etcd has all principals")
	}
	if len(c.Etcd) == 0 {
		bad("auth.roles_etcd", "needs cluster.etcd")
	}
	if below, ok := strings.CutPrefix(a.RolesEtcd, c.Prefix+"/"); !strings.HasPrefix(a.RolesEtcd, "/") || strings.HasSuffix(a.RolesEtcd, "/") || ok && below != "roles" {
		bad("auth.roles_etcd", "%q must begin with a slash and not end with one, and below cluster.prefix only %s/roles is free", a.RolesEtcd, c.Prefix)
	}
}

// checkExposure reports addresses that other machines can reach although neither tokens nor client
// certificates are required. The address http is exempt: it serves metrics and health, which
// scrapers on other machines need (serve logs a warning), and it restricts pprof to callers on
// loopback.
func (a Auth) checkExposure(bad complaint, addrs map[string]string) {
	if a.TokenFile != "" || a.Roles() || a.ClientCA != "" {
		return
	}
	for key, addr := range addrs {
		if _, _, err := net.SplitHostPort(addr); err == nil && !Loopback(addr) {
			bad(key, "%s is reachable from other machines and none of auth.token_file, auth.client_ca and (nodes and planners) auth.roles_file or auth.roles_etcd is set; set one, or say --insecure", addr)
		}
	}
}

// Loopback reports whether only this machine can reach a listen address.
func Loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
