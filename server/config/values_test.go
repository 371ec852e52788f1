package config

import (
	"fmt"
	"strings"
	"testing"
)

// TestValues: Validate accepts exactly the values that a key lists.
func TestValues(t *testing.T) {
	found := 0
	for _, k := range keysOf(&Config{}) {
		if len(k.Values) == 0 {
			continue
		}
		found++
		c := Default()
		c.Data = []string{"/x"}
		for _, own := range c.Keys() {
			if own.Path == k.Path {
				if err := own.Set("nonsense"); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf(`"nonsense" is not one of %v`, k.Values)) {
			t.Errorf("%s offers %v; an unknown value: %v", k.Path, k.Values, err)
		}
	}
	if found != 7 {
		t.Errorf("%d keys offer values; want 7", found)
	}
}
