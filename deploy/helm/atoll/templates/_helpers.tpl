{{- define "atoll.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "atoll.address" -}}
{{ .Values.address | default (printf "%s.%s.svc" (include "atoll.name" .) .Release.Namespace) }}
{{- end }}

{{- define "atoll.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false # variables of Services would look like misspelt settings, which Atoll refuses
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "atoll.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
