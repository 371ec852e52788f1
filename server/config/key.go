package config

import (
	"cmp"
	"encoding"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// EnvPrefix is the prefix of the name of every environment variable that is read.
const EnvPrefix = "PENSTOCK_"

// clientEnv lists variables with the same prefix that belong to other commands and are not keys of
// a node.
var clientEnv = []string{"PENSTOCK_SERVER", "PENSTOCK_PLANNER", "PENSTOCK_TOKEN_FILE", "PENSTOCK_CA", "PENSTOCK_CERT", "PENSTOCK_KEY", "PENSTOCK_FORMAT", "PENSTOCK_TRACES"}

// serviceEnv matches the variables that Kubernetes sets in every pod for a Service whose name is
// penstock, or begins with "penstock-": PENSTOCK_SERVICE_HOST, PENSTOCK_PORT,
// PENSTOCK_PORT_7420_TCP_ADDR, … The operator did not set them, so they are no errors.
var serviceEnv = regexp.MustCompile(`^PENSTOCK_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// A Key is one setting: its path in YAML, its help text, and a reference to its field.
type Key struct {
	// Path is the dotted path, "auth.token_file".
	Path string
	// Doc is one line of help.
	Doc string
	// Values are the possible values, if they are few and fixed.
	Values []string
	// Restart is the reason why a running process cannot change the setting; empty if the process
	// can change it.
	Restart string
	// toggle is the reason why a running process cannot change the setting from empty to a value or
	// from a value to empty; empty if the process can do both.
	toggle string
	value  reflect.Value
}

// Env returns the name of the key's environment variable.
func (k Key) Env() string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(k.Path, ".", "_"))
}

// Flag returns the name of the key's flag, without dashes.
func (k Key) Flag() string { return strings.NewReplacer(".", "-", "_", "-").Replace(k.Path) }

// Bool reports whether the key is a switch.
func (k Key) Bool() bool { return k.value.Kind() == reflect.Bool }

// List reports whether the key is a list, whose elements Set reads separated by commas.
func (k Key) List() bool { return k.value.Kind() == reflect.Slice }

// Set parses text and sets the key's field.
func (k Key) Set(text string) error {
	if u, ok := k.value.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return u.UnmarshalText([]byte(text))
	}
	switch k.value.Kind() {
	case reflect.String:
		k.value.SetString(text)
	case reflect.Bool:
		v, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		k.value.SetBool(v)
	case reflect.Int:
		v, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", text)
		}
		k.value.SetInt(int64(v))
	case reflect.Float64:
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%q is not a number", text)
		}
		k.value.SetFloat(v)
	case reflect.Slice:
		var list []string
		if text != "" {
			list = strings.Split(text, ",")
		}
		k.value.Set(reflect.ValueOf(list))
	default:
		panic("config: key " + k.Path + " has a type that Set does not know")
	}
	return nil
}

// String returns the key's current value in a form that Set reads. A Size is rounded for
// readability.
func (k Key) String() string {
	switch v := k.value.Interface().(type) {
	case fmt.Stringer:
		return v.String()
	case []string:
		return strings.Join(v, ",")
	default:
		return fmt.Sprint(v)
	}
}

// Keys returns every key of c, in the order of the struct. Setting a key sets
// the field of c.
func (c *Config) Keys() []Key { return keysOf(c) }

// keysOf returns the keys of the struct that c points to.
func keysOf(c any) []Key { return appendKeys(nil, "", "", reflect.ValueOf(c).Elem()) }

// appendKeys appends the keys of the struct v. prefix is the path of v with a final dot. restart is
// the Restart of the fields that have no restart tag.
func appendKeys(keys []Key, prefix, restart string, v reflect.Value) []Key {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		path, restart := prefix+f.Tag.Get("yaml"), cmp.Or(f.Tag.Get("restart"), restart)
		if v.Field(i).Kind() == reflect.Struct {
			keys = appendKeys(keys, path+".", restart, v.Field(i))
			continue
		}
		k := Key{Path: path, Doc: f.Tag.Get("doc"), Values: strings.Fields(f.Tag.Get("values")), toggle: f.Tag.Get("toggle"), value: v.Field(i)}
		switch reload := f.Tag.Get("reload"); {
		case reload == "live":
		case reload != "" || restart == "":
			panic("config: key " + path + " has neither the tag reload nor the tag restart")
		default:
			k.Restart = restart
		}
		keys = append(keys, k)
	}
	return keys
}

// readEnv sets keys from variables in the form of os.Environ and refuses variables with EnvPrefix
// that name no key.
func readEnv(c any, environ []string) error {
	byEnv := make(map[string]Key)
	for _, k := range keysOf(c) {
		byEnv[k.Env()] = k
	}
	for _, kv := range environ {
		name, text, _ := strings.Cut(kv, "=")
		k, ok := byEnv[name]
		if !ok && (!strings.HasPrefix(name, EnvPrefix) || slices.Contains(clientEnv, name) || serviceEnv.MatchString(name)) {
			continue
		}
		if !ok {
			return fmt.Errorf("config: environment variable %s names no key; the nearest is %s: %w", name, nearest(name, slices.Sorted(maps.Keys(byEnv))), ErrConfig)
		}
		if err := k.Set(text); err != nil {
			return fmt.Errorf("config: %s: %w: %w", name, err, ErrConfig)
		}
	}
	return nil
}

// nearest returns the name that shares the longest prefix with want.
func nearest(want string, names []string) string {
	shared := func(s string) int {
		n := 0
		for n < len(s) && n < len(want) && s[n] == want[n] {
			n++
		}
		return n
	}
	return slices.MaxFunc(names, func(a, b string) int { return shared(a) - shared(b) })
}
